"""How long a browser may look: streams end with their sessions, projects do not push out each other's sessions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from art_patch.web.access import SESSION_S, Access, Session
from tests.support.web import Served, csrf_of, served


def project(home: Path, name: str) -> Settings:
    settings = load_settings(home=home, project=name)
    settings.directory.mkdir(parents=True)
    open_store(settings.store_url, project=name).close()
    return settings


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(project(tmp_path, "one"), project(tmp_path, "two")) as running:
        yield running


def test_the_live_stream_ends_when_its_browser_leaves(server: Served):
    with server.entered("one") as client, client.stream("GET", "/p/one/live") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 2000"
        with server.client(cookies=client.cookies) as same:
            left = same.post("/leave", data={"csrf": csrf_of(same.get("/p/one/"))})
        assert left.status_code == 303
        began = time.monotonic()
        for _ in lines:  # until the server ends it, else httpx's timeout raises
            assert time.monotonic() - began < 10
        assert client.get("/p/one/live").status_code == 401


def test_the_live_stream_ends_with_its_session_and_with_the_right_to_the_project():
    now = [1_000.0]
    access = Access({"one": "key", "two": "key"}, port=1, secure=False, clock=lambda: now[0])

    def session(link: str, cookie: str | None = None) -> tuple[str, Session]:
        entered = access.enter(link, cookie)
        assert entered is not None
        return entered[0], access._sessions[next(reversed(access._sessions))]  # pyright: ignore[reportPrivateUsage]

    _, mine = session(access.link("one", "look"))
    assert [access.is_open(mine, name) for name in ("one", "two")] == [True, False]
    now[0] += SESSION_S
    assert not access.is_open(mine, "one")
    cookie, mine = session(access.link("one", "act"))
    del mine.roles["one"]
    assert not access.is_open(mine, "one")
    cookie, first = session(access.link("one", "act"))
    session(access.link("two", "act"), cookie)
    assert not access.is_open(first, "one")  # the browser has a new cookie, with which its pages follow again


def test_a_head_of_the_live_stream_is_answered_at_once(server: Served):
    with server.entered("one") as client:
        answer = client.head("/p/one/live")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for path in ("/p/one/", "/p/one/runs", "/enter", "/health"):
            assert client.head(path).status_code == 200, path


def test_a_project_with_too_many_sessions_pushes_out_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("art_patch.web.access._MOST_SESSIONS", 3)
    with (
        served(project(tmp_path, "one"), project(tmp_path, "two")) as running,
        running.entered("two") as other,
        running.entered("one") as client,
    ):
        form, cookies = {"csrf": csrf_of(client.get("/p/one/")), "role": "look"}, list[httpx.Cookies]()
        for _ in range(5):
            token = client.post("/p/one/link", data=form).text.partition("/enter#")[2].partition('"')[0]
            with running.client() as fresh:
                assert fresh.post("/enter", data={"token": token}).status_code == 303
                cookies.append(fresh.cookies)
        assert other.get("/p/two/").status_code == 200
        found = [httpx.get(f"{running.url}/p/one/", cookies=each).status_code for each in cookies]
        # The one idle longest goes; the browser that made the links was busy all the time.
        assert (found, client.get("/p/one/").status_code) == ([401, 401, 401, 200, 200], 200)


def test_who_is_pushed_out_of_a_project_keeps_the_others():
    access = Access({"one": "key", "two": "key"}, port=1, secure=False)
    entered = access.enter(access.link("two", "act"), None)
    assert entered is not None
    entered = access.enter(access.link("one", "look"), entered[0])
    assert entered is not None
    both = next(iter(access._sessions.values()))  # pyright: ignore[reportPrivateUsage]
    for _ in range(1_000):
        access.enter(access.link("one", "look"), None)
    assert both.roles == {"two": "act"}
    assert access.is_open(both, "two")


@pytest.mark.parametrize("site", ["same-site", "cross-site"])  # `same-site`: another port of this machine
def test_a_page_of_another_server_may_only_link(server: Served, site: str):
    with server.entered("one") as client:
        page = client.get("/p/one/")
        for mode, wanted in (("no-cors", "script"), ("cors", "empty"), ("navigate", "iframe"), ("no-cors", "image")):
            shown = {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": wanted}
            for path in ("/p/one/", "/p/one/live", "/api/v1/one", "/static/page.js"):
                assert client.get(path, headers=shown).status_code == 403, (path, mode)
        link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert client.get("/p/one/", headers=link).status_code == 200
        form = {"csrf": csrf_of(page), "role": "look"}
        assert client.post("/p/one/link", data=form, headers=link).status_code == 403


def test_another_port_of_this_machine_is_another_origin(server: Served):
    port = urlsplit(server.url).port
    with server.entered("one") as client:
        form = {"csrf": csrf_of(client.get("/p/one/")), "role": "look"}
        for origin in (
            "http://127.0.0.1",
            f"http://127.0.0.1:{port}1",
            f"http://localhost:{port}",
            "http://127.0.0.1:80",
        ):
            assert client.post("/p/one/link", data=form, headers={"origin": origin}).status_code == 403, origin
        assert client.post("/p/one/link", data=form).status_code == 200
