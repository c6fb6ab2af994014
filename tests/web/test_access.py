"""Who may see and change what: links, cookies, keys, and all that a page of another site could try."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from art_patch.errors import ConfigError, PortInUse, StoreError
from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from art_patch.types import Call, Choice, TrajectoryInfo
from art_patch.web.access import LINK_S, SESSION_S, Access
from tests.support.web import Served, csrf_of, served

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e&\"'"


def project(home: Path, name: str, *, said: str = "hello") -> Settings:
    """A project with one run."""
    settings = load_settings(home=home, project=name)
    settings.directory.mkdir(parents=True)
    store = open_store(settings.store_url, project=name)
    answer = Choice(0, {"role": "assistant", "content": said}, "stop")
    call = Call("c1", f"{name}-t1", 1.0, "m", ({"role": "user", "content": said},), (answer,), duration_ms=5.0)
    store.write([TrajectoryInfo(f"{name}-t1", 1.0), call])
    store.close()
    return settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    with served(project(home, "one"), project(home, "two")) as running:
        yield running


def test_nothing_is_shown_without_a_link(server: Served):
    with server.client() as client:
        assert client.get("/").headers["location"] == "/enter"
        for path in ("/p/one/", "/p/one/live", "/status", "/api/v1/one", "/api/v1/openapi.json"):
            response = client.get(path)
            assert (response.status_code, "one-t1" in response.text) == (401, False), path
        assert client.get("/health").json() == {"status": "ok"}


def test_a_link_works_once_and_for_its_project(tmp_path: Path):
    with served(project(tmp_path, "one"), project(tmp_path, "two")) as running:
        link = running.links["one"]
        assert urlsplit(link).path == "/enter"
        with running.entered("one") as client, running.client() as late:
            assert client.get("/p/one/").status_code == 200
            assert client.get("/p/two/").status_code == 404
            assert client.get("/api/v1/two").status_code == 404
            refused = late.post("/enter", data={"token": urlsplit(link).fragment})
            assert (refused.status_code, refused.headers.get("set-cookie")) == (403, None)
            # A browser that enters a second link sees both.
            client.post("/enter", data={"token": urlsplit(running.links["two"]).fragment})
            assert [client.get(f"/p/{name}/").status_code for name in ("one", "two")] == [200, 200]
            cookie = client.cookies.jar
            assert all(each.has_nonstandard_attr("HttpOnly") for each in cookie)
            page = client.get("/p/one/")
            assert client.post("/leave", data={"csrf": csrf_of(page)}).status_code == 200
            assert client.get("/p/one/").status_code == 401


def test_a_link_and_a_session_end():
    now = [1_000.0]
    access = Access({"one": "key"}, port=1, secure=False, clock=lambda: now[0])
    late, used = access.link("one", "look"), access.link("one", "look")
    entered = access.enter(used, None)
    assert entered is not None
    cookie, _ = entered
    scope = {"type": "http", "headers": [(b"cookie", f"{access.cookie}={cookie}".encode())]}
    from starlette.requests import Request

    now[0] += SESSION_S - 1
    assert access.session(Request(scope)) is not None  # it lasts from here on
    now[0] += SESSION_S + 1
    assert access.session(Request(scope)) is None
    now[0] += LINK_S
    assert access.enter(late, None) is None


def test_who_enters_with_both_links_may_act_with_the_better_one():
    access = Access({"one": "key"}, port=1, secure=True)
    look, act = access.link("one", "look"), access.link("one", "act")
    first = access.enter(act, None)
    assert first is not None
    second = access.enter(look, first[0])
    assert second is not None
    from starlette.requests import Request

    def roles(cookie: str) -> dict[str, str] | None:
        scope = {"type": "http", "headers": [(b"cookie", f"{access.cookie}={cookie}".encode())]}
        session = access.session(Request(scope))
        return None if session is None else dict(session.roles)

    assert roles(second[0]) == {"one": "act"}
    assert roles(first[0]) is None  # a cookie that was there before the link is worth nothing after it


def test_a_program_shows_the_projects_key_and_may_only_look(server: Served):
    headers = {"authorization": f"Bearer {server.key('one')}"}
    with server.client(headers=headers) as client:
        assert client.get("/status").json()["project"] == "one"
        assert client.get("/api/v1/one").json()["recorded"]["calls"] == 1
        assert client.get("/api/v1/two").status_code == 404
        assert client.get("/status?project=two").status_code == 404
        document = client.get("/api/v1/openapi.json").json()
        assert "/api/v1/{project}" in document["paths"]
        assert client.post("/p/one/link", data={"role": "act", "csrf": ""}).status_code == 403
    key_file = server.settings["one"].directory / "web.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    with server.client() as client:
        # A key in the address is none, so that no log gets one.
        assert client.get("/status", params={"key": server.key("one")}).status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_name_of_this_machine_is_refused(server: Served, host: str):
    """DNS rebinding: a page of another site whose name leads here."""
    with server.client(headers={"authorization": f"Bearer {server.key('one')}", "host": host}) as client:
        assert client.get("/status").status_code in (400, 403)


def test_a_change_must_come_from_a_page_of_this_server(tmp_path: Path):
    with served(project(tmp_path, "one")) as running, running.entered() as client:
        token = csrf_of(client.get("/p/one/"))
        ours = {"csrf": token, "role": "look"}
        for origin in ("http://evil.example", "null", running.url.replace("http:", "https:"), f"{running.url}0"):
            assert client.post("/p/one/link", data=ours, headers={"origin": origin}).status_code == 403, origin
        with httpx.Client(base_url=running.url, cookies=client.cookies) as without:
            assert without.post("/p/one/link", data=ours).status_code == 403
        assert client.post("/p/one/link", data=ours, headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.post("/p/one/link", data={"role": "look"}).status_code == 403
        assert client.post("/p/one/link", data=ours | {"csrf": token[:-1] + "x"}).status_code == 403
        assert client.post("/p/one/link", json=ours).status_code == 415
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert client.request(method, "/p/one/link").status_code == 405
        assert client.post("/p/one/link", data=ours).status_code == 200


def test_a_link_for_looking_changes_nothing_and_makes_no_link(tmp_path: Path):
    with served(project(tmp_path, "one"), role="look") as running, running.entered() as client:
        page = client.get("/p/one/")
        assert "You may look." in page.text
        refused = client.post("/p/one/link", data={"csrf": csrf_of(page), "role": "act"})
        assert (refused.status_code, "for looking only" in refused.text) == (403, True)


def test_a_new_link_is_made_by_who_may_act(tmp_path: Path):
    with served(project(tmp_path, "one")) as running, running.entered() as client:
        made = client.post("/p/one/link", data={"csrf": csrf_of(client.get("/p/one/")), "role": "look"})
        found = re.search(r"/enter#([\w-]+)", made.text)
        assert found is not None
        with running.client(follow_redirects=True) as other:
            assert "You may look." in other.post("/enter", data={"token": found[1]}).text


def test_every_answer_keeps_other_pages_out(server: Served):
    with server.client(headers={"authorization": f"Bearer {server.key('one')}"}) as client:
        for path in ("/p/one/", "/enter", "/static/page.js", "/nowhere", "/p/one/?days=x"):
            headers = client.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] in ("no-store", "no-cache")


def status_of(server: Served, path: str) -> str:
    """The status of a request whose path is sent as it is; empty if the server hung up."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port or 0), timeout=30) as connection:
        with suppress(OSError):
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n\r\n".encode())
        answer = b""
        with suppress(OSError):
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert b"import" not in answer
    assert b"root:" not in answer
    return answer.split(b" ")[1].decode() if answer else ""


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd", "/p/../status"]
)
def test_no_path_leads_out_of_the_static_files(server: Served, path: str):
    assert status_of(server, path) in ("404", "401")


def test_long_queries_and_bodies_are_refused(server: Served):
    with server.client(headers={"authorization": f"Bearer {server.key('one')}"}) as client:
        assert client.get("/api/v1/one", params={"days": "1" * 20_000}).status_code == 414
        assert status_of(server, f"/api/v1/one?days={'1' * 10_000_000}") in ("400", "")  # refused, or hung up on
        assert client.post("/enter", content=b"token=" + b"x" * (2 << 20), headers=FORM).status_code == 413
        assert client.post("/enter", content="&".join("a=b" for _ in range(200)), headers=FORM).status_code == 400
        assert client.get("/status").status_code == 200


FORM = {"content-type": "application/x-www-form-urlencoded"}


def test_a_wrong_parameter_is_told(server: Served):
    with server.client(headers={"authorization": f"Bearer {server.key('one')}"}) as client:
        response = client.get("/api/v1/one?days=many")
        assert response.status_code == 422
        assert "days" in response.json()["error"]["message"]


# --- starting ---


def test_beyond_this_machine_tls_is_asked_for(tmp_path: Path):
    settings = project(tmp_path, "one")
    with pytest.raises(ConfigError, match="in the clear"), served(settings, host="0.0.0.0"):
        pass
    with pytest.raises(ConfigError, match="https://"), served(settings, advertise="http://art.example.com"):
        pass


def test_it_answers_over_tls_and_the_cookie_stays_there(tmp_path: Path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with served(project(tmp_path, "one"), certificate=(certificate, key)) as running:
        assert running.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with running.client(verify=trusting) as client:
            token = urlsplit(running.links["one"]).fragment
            entered = client.post("/enter", data={"token": token})
            assert entered.status_code == 303
            cookie = entered.headers["set-cookie"]
            assert cookie.startswith("__Host-art_patch_web_")
            assert all(word in cookie for word in ("Secure", "HttpOnly", "SameSite=strict", "Path=/"))
            left = client.post("/leave", data={"csrf": csrf_of(client.get("/p/one/"))})
            # Browsers ignore a cookie of such a name that is not `Secure`, also one that deletes it.
            assert all(word in left.headers["set-cookie"] for word in ("__Host-", "Max-Age=0", "Secure", "Path=/"))


def test_behind_a_proxy_its_name_and_origin_count(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with served(project(tmp_path, "one"), advertise="https://art.example.com/", port=port) as running:
        assert running.links["one"].startswith("https://art.example.com/enter#")
        # What the proxy sends on: the browser's `Host` and `Origin`, over plain HTTP.
        headers = {"host": "art.example.com", "origin": "https://art.example.com"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
            data = {"token": urlsplit(running.links["one"]).fragment}
            assert client.post("/enter", data=data, headers={"origin": f"http://127.0.0.1:{port}"}).status_code == 403
            entered = client.post("/enter", data=data)
            assert entered.status_code == 303
            name, _, rest = entered.headers["set-cookie"].partition("=")
            shown = {"cookie": f"{name}={rest.partition(';')[0]}"}
            assert client.get("/p/one/", headers=shown).status_code == 200
            assert client.get("/p/one", headers=shown).headers["location"] == "/p/one/"  # not to http://
            assert "location" not in client.get("/p/one/runs/", headers=shown).headers
            assert client.get("/p/two", headers=shown).status_code == 404
            assert client.get("/p/one/", headers=shown | {"host": "evil.example"}).status_code == 403


def test_a_port_in_use_and_a_store_that_is_not_there_are_told(tmp_path: Path):
    settings = project(tmp_path, "one")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUse), served(settings, port=taken.getsockname()[1]):
            pass
    with pytest.raises(StoreError), served(load_settings(home=tmp_path, project="nobody")):
        pass


def test_what_strangers_said_is_text(tmp_path: Path):
    with served(project(tmp_path, "one", said=EVIL)) as running, running.entered() as client:
        for page in ("/p/one/",):
            text = client.get(page).text
            assert "<script>alert" not in text
            assert "\u202e" not in text


def two_pages(client: httpx.Client, stack: ExitStack) -> None:
    """Follow the project twice, until the stack ends."""
    for _ in range(2):
        lines = stack.enter_context(client.stream("GET", "/p/one/live")).iter_lines()
        stack.callback(id, lines)  # held here: an iterator that nobody holds ends the stream
        assert next(lines) == "retry: 2000"


def test_too_many_open_pages_are_refused_before_the_answer_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("art_patch.web.live._MOST_READERS", 2)
    with served(project(tmp_path, "one")) as running, running.entered() as client, ExitStack() as stack:
        two_pages(client, stack)
        assert client.get("/p/one/live").status_code == 503


def test_who_opens_many_pages_keeps_nobody_else_from_following(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("art_patch.web.live._MOST_OF_ONE", 2)
    with served(project(tmp_path, "one")) as running, running.entered() as client, ExitStack() as stack:
        two_pages(client, stack)
        assert client.get("/p/one/live").status_code == 503
        other = stack.enter_context(running.client(headers={"authorization": f"Bearer {running.key('one')}"}))
        assert next(stack.enter_context(other.stream("GET", "/p/one/live")).iter_lines()) == "retry: 2000"


def test_passwords_in_addresses_are_not_shown(tmp_path: Path):
    settings = project(tmp_path, "one")
    with_login = settings.model_copy(update={"judge_base_url": "http://me:geheim@judge.example/v1"})
    with served(with_login, role="look") as running, running.entered() as client:
        for path in ("/p/one/system", "/api/v1/one/system", "/p/one/system/doctor"):
            text = client.get(path).text
            assert "geheim" not in text, path


@pytest.mark.parametrize("who", ["", " ", "\0", "\u200b", "\u2060", "\u3164", "Ada\u202e"])
def test_a_change_names_somebody_whom_people_can_read(tmp_path: Path, who: str):
    with served(project(tmp_path, "one")) as running, running.entered() as client:
        form = {"csrf": csrf_of(client.get("/p/one/")), "who": who, "name": "thumbs", "value": "1"}
        refused = client.post("/p/one/score-run/one-t1", data=form)
        assert (refused.status_code, "say who you are" in refused.text) == (409, True)


def test_a_correction_that_no_page_could_show_is_refused(tmp_path: Path):
    with served(project(tmp_path, "one")) as running, running.entered() as client:
        form = {"csrf": csrf_of(client.get("/p/one/")), "who": "Ada", "how": "json"}
        for answer in ("[" * 200_000, '{"role": "assistant", "content": "x", "a": ' + "[" * 900 + "]" * 900 + "}"):
            assert client.post("/p/one/correct-run/one-t1", data=form | {"answer": answer}).status_code == 409
        right = form | {"answer": '{"role": "assistant", "content": "x"}'}
        assert client.post("/p/one/correct-run/one-t1", data=right | {"call": "nosuch"}).status_code == 404
        for referer in ("https://evil.example/p/one/x", "http://["):
            headers = {"referer": referer}
            kept = client.post("/p/one/correct-run/one-t1", data=right, headers=headers, follow_redirects=False)
            assert (kept.status_code, kept.headers["location"].startswith("/p/one/")) == (303, True)
        assert client.get("/p/one/runs/one-t1").status_code == 200


def test_times_that_no_calendar_has_break_no_page(tmp_path: Path):
    settings = project(tmp_path, "one")
    store = open_store(settings.store_url, project="one")
    answer = Choice(0, {"role": "assistant", "content": "x"}, "stop")
    for key, at in (("ms", 1.76e12), ("far", 1e18)):
        call = Call(f"c-{key}", f"t-{key}", at, "m", ({"role": "user", "content": "x"},), (answer,), duration_ms=5.0)
        store.write([TrajectoryInfo(f"t-{key}", at), call])
    store.close()
    with served(settings) as running, running.entered() as client:
        for path in ("runs", "runs/t-ms", "runs/t-far", "", "system?before=9223372036854775808"):
            assert client.get(f"/p/one/{path}").status_code in (200, 422), path
