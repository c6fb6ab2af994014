"""The page and the API behind a link, over real HTTP and a real store."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from art_patch.errors import ConfigError, StoreError
from art_patch.feedback import run_feedback
from art_patch.feedback.app import MAX_BODY
from art_patch.feedback.links import Link, secret_of, url_of
from art_patch.settings import Settings
from art_patch.store import Store, open_store
from art_patch.store.queries.read import Reader
from art_patch.store.write import Writer
from art_patch.types import Score, TrajectoryInfo
from tests.support.crossing import MARK, fill, rows_of

LATER = 99_999_999_999
EVIL = "</textarea><script>alert(1)</script>&\"'"
FORM = {"content-type": "application/x-www-form-urlencoded"}
JSON = {"content-type": "application/json"}


class Desk:
    """A feedback server in a thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store: Store = open_store(settings.store_url, project=settings.project)
        self.store.write([TrajectoryInfo("t1", 1.0)])
        self.url = ""
        self._stop, ready = threading.Event(), threading.Event()

        def on_ready(here: str) -> None:
            self.url = here
            ready.set()

        self._thread = threading.Thread(
            target=run_feedback, args=(settings,), kwargs={"stop": self._stop, "on_ready": on_ready}
        )
        self._thread.start()
        assert ready.wait(30)

    def link(self, trajectory: str = "t1", name: str = "thumbs", expires: int = LATER) -> str:
        return url_of(Link(trajectory, name, expires), "", secret_of(self.settings), self.settings.project)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found

    def click(self, path: str, **fields: str) -> tuple[int, dict[str, str], str]:
        return self.ask("POST", path, urlencode(fields), FORM)

    def scores(self, trajectory: str = "t1") -> list[Score]:
        return [score for run in self.store.read.trajectories([trajectory]) for score in run.scores]

    def end(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.store.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(Settings(home=tmp_path, redact=lambda text: text.replace("4711", "[number]")))
    yield desk
    desk.end()


class Page(HTMLParser):
    """What a browser would make of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_asks_and_loads_nothing(desk: Desk):
    status, headers, text = desk.ask("GET", desk.link())
    page = Page(text)
    assert status == 200
    (form,) = [attributes for tag, attributes in page.tags if tag == "form"]
    assert form == {"method": "post"}  # to the same address, with its signature
    buttons = [attributes for tag, attributes in page.tags if tag == "button"]
    assert [(button["name"], button["value"], "class" in button) for button in buttons] == [
        ("value", "1", False),
        ("value", "0", False),
    ]
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "http" not in text
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"]


def test_looking_at_a_link_never_writes(desk: Desk):
    for method in ("GET", "HEAD"):
        assert desk.ask(method, desk.link() + "&value=1")[0] == 200
    assert desk.scores() == []


def test_a_link_may_choose_beforehand(desk: Desk):
    page = Page(desk.ask("GET", desk.link() + "&value=0")[2])
    chosen = [attributes["value"] for tag, attributes in page.tags if tag == "button" and "class" in attributes]
    assert (chosen, "confirm" in page.words) == (["0"], True)


def test_a_click_is_a_score_and_a_second_one_replaces_it(desk: Desk):
    link = desk.link()
    status, _, text = desk.click(link, value="1", comment=f"my order 4711\r\n{EVIL}")
    assert (status, "Thank you" in text, "<script>" in text) == (200, True, False)
    (score,) = desk.scores()
    assert (score.name, score.value, score.source, score.comment) == (
        "thumbs", 1.0, "user", f"my order [number]\n{EVIL}",
    )  # fmt: skip
    desk.click(link + "&value=1", value="0", comment=" ")
    (again,) = desk.scores()
    assert (again.id, again.value, again.comment) == (score.id, 0.0, None)
    desk.click(desk.link(expires=LATER - 1), value="1")
    assert len(desk.scores()) == 2


def test_apps_send_json_to_the_same_link(desk: Desk):
    link = desk.link(name="rating")
    status, _, text = desk.ask("POST", link, json.dumps({"value": -0.5, "comment": "hm"}), JSON)
    assert (status, json.loads(text)) == (200, {"noted": True, "name": "rating", "value": -0.5})
    assert [(score.name, score.value, score.comment) for score in desk.scores()] == [("rating", -0.5, "hm")]
    status, _, text = desk.ask("POST", link + "x", json.dumps({"value": 1}), JSON)
    assert (status, list(json.loads(text))) == (403, ["error"])


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("thumbs", "1", 200), ("thumbs", "0", 200), ("thumbs", "0.5", 422), ("thumbs", "-1", 422), ("thumbs", "", 422),
        ("thumbs", "nan", 422), ("reward", "0.3", 200), ("reward", "-0.1", 422), ("rating", "-1", 200),
        ("rating", "1.01", 422), ("rating", "inf", 422), ("rating", "up", 422),
    ],
)  # fmt: skip
def test_values_have_a_range(desk: Desk, name: str, value: str, status: int):
    assert desk.click(desk.link(name=name), value=value)[0] == status
    assert len(desk.scores()) == (status == 200)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"value=1", {}, 415),
        (b"value=1", {"content-type": "multipart/form-data; boundary=x"}, 415),
        (b"", FORM, 422),
        (b"&".join(b"a=1" for _ in range(50)), FORM, 400),
        (b"value=1", JSON, 400),
        (b"[1]", JSON, 400),
        (b"\xff", JSON, 400),
        (b"[" * 10_000, JSON, 400),
        (b'{"value": [1]}', JSON, 422),
        (b'{"value": 1, "comment": 7}', JSON, 422),
        (b'{"value": 1, "comment": "' + b"x" * 2_001 + b'"}', JSON, 413),
        (b"comment=" + b"x" * MAX_BODY, FORM, 413),
    ],
)
def test_bodies_that_are_none(desk: Desk, body: bytes, headers: dict[str, str], status: int):
    assert desk.ask("POST", desk.link(), body, headers)[0] == status
    assert desk.scores() == []


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_ours_and_what_is_over(desk: Desk, method: str):
    body, headers = ("value=1", FORM) if method == "POST" else (None, {})
    for path in ("/feedback", desk.link() + "x", desk.link().replace("t1", "t2"), desk.link() + "&name=reward"):
        status, _, text = desk.ask(method, path, body, headers)
        assert (status, "not valid" in text) == (403, True)
    status, _, text = desk.ask(method, desk.link(expires=1), body, headers)
    assert (status, "expired" in text) == (410, True)
    assert desk.scores() == []


def test_links_of_one_project_do_nothing_in_another(tmp_path: Path, record_property):
    """Also if both have the same store and secret, and a run with the same id."""
    shared = {"home": tmp_path, "store": f"sqlite:///{tmp_path}/shared.db", "feedback_secret": "x" * 32}
    theirs = open_store(str(shared["store"]), project="theirs")
    fill(theirs, "zebra", MARK)
    theirs_desk, desk = (Desk(Settings(project=project, **shared)) for project in ("theirs", "mine"))
    desk.store.write([TrajectoryInfo("shared", 1.0)])
    before, attempts, crossed = rows_of(theirs, "theirs"), 0, list[Any]()
    for trajectory in ("zebra-run", "shared", "t1"):
        link = theirs_desk.link(trajectory)
        forged = f"{desk.link(trajectory).partition('&signature')[0]}&signature={link.partition('&signature=')[2]}"
        # What their app signed; and what my own app may sign, with an id of theirs.
        for path, status in ((link, 403), (f"{link}&project=theirs", 403), (forged, 403), (desk.link(trajectory), 200)):
            for method, body, headers in (
                ("GET", None, {}),
                ("POST", urlencode({"value": "1"}), FORM),
                ("POST", json.dumps({"value": 1}), JSON),
            ):
                attempts += 1
                answered, _, text = desk.ask(method, path, body, headers)
                if answered != status or MARK in text or rows_of(theirs, "theirs") != before:
                    crossed.append((method, path, answered, text))
    assert crossed == []
    assert {run: len(desk.scores(run)) for run in ("zebra-run", "shared", "t1")} == {
        "zebra-run": 0,
        "shared": 1,
        "t1": 1,
    }
    record_property("figure", [f"requests with feedback links that crossed, of {attempts}", "0", "0"])
    for one in (theirs_desk, desk):
        one.end()
    theirs.close()


def test_nothing_tells_whether_a_run_is_known(desk: Desk):
    known, unknown = desk.click(desk.link(), value="1"), desk.click(desk.link("gone"), value="1")
    assert known == unknown
    # Whose data was erased does not come back by a click.
    assert desk.store.read.counts()["scores"] == 1
    assert desk.store.verify() == []


def test_other_addresses(desk: Desk):
    assert desk.ask("GET", "/health")[0] == 200
    assert desk.ask("GET", "/")[0] == 404
    assert desk.ask("DELETE", desk.link())[0] == 405


def test_a_store_that_cannot_be_written_is_said_plainly(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: Any) -> None:
        raise StoreError("disk full at /secret/path")

    monkeypatch.setattr(Writer, "write", refuses)
    monkeypatch.setattr(Reader, "known", refuses)
    status, _, text = desk.click(desk.link(), value="1")
    assert (status, "try again" in text, "secret" in text) == (503, True, False)


def test_an_address_that_is_none(tmp_path: Path):
    with pytest.raises(ConfigError, match="--advertise"):
        run_feedback(Settings(home=tmp_path), advertise="feedback.example.com")


@pytest.mark.parametrize(("how", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_serves_links_that_apps_make(tmp_path: Path, how: signal.Signals, code: int):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}
    environment["ART_PATCH_HOME"] = str(tmp_path)
    command = [sys.executable, "-m", "art_patch", "feedback", "serve", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        app = (
            "import art_patch\n"
            "with art_patch.patch(mode='record'), art_patch.trajectory(id='from-app'):\n"
            "    print(art_patch.feedback_url())\n"
        )
        made = subprocess.run([sys.executable, "-c", app], capture_output=True, text=True, check=True, env=environment)
        link = urlsplit(made.stdout.strip())
        assert f"{link.scheme}://{link.netloc}" == ready["base_url"]
        connection = http.client.HTTPConnection(link.netloc, timeout=30)
        connection.request("POST", f"{link.path}?{link.query}", "value=1&comment=nice", FORM)
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        server.send_signal(how)
        _, stderr = server.communicate(timeout=30)
    assert server.returncode == code
    assert link.query not in stderr
    store = open_store(Settings(home=tmp_path).store_url)
    ((run,), problems) = store.read.trajectories(["from-app"]), store.verify()
    store.close()
    assert ([(score.name, score.value, score.comment) for score in run.scores], problems) == (
        [("thumbs", 1.0, "nice")],
        [],
    )
