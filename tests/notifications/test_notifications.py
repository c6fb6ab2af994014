"""What people are told: each decision once, over a real webhook, and never at the price of a cycle."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.cli.commands.cycles import tell_people
from art_patch.errors import ConfigError
from art_patch.notifications import Notifier, addresses
from art_patch.notifications.notifier import SILENT, of_test
from art_patch.policies import base_fingerprint
from art_patch.settings import load_settings
from art_patch.store import Store, open_store
from art_patch.types import Call, Policy, Score, TrajectoryInfo
from tests.support.command_line import ENVIRONMENT, Serving, art_patch, warned
from tests.support.postgres import new_server
from tests.support.proxies import until
from tests.support.run_samples import asked
from tests.support.tiny import make_tiny_adapter

TOKEN = "T0KEN-OF-THE-HOOK"


class Webhook:
    """A real server that takes messages; below `/bad` it refuses them."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if not self.path.startswith("/bad"):
                    hook.got.append(body)
                self.send_response(403 if self.path.startswith("/bad") else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def url(self, path: str = "ok") -> str:
        return f"json://127.0.0.1:{self.server.server_port}/{path}/{TOKEN}"

    @property
    def titles(self) -> list[str]:
        return [message["title"] for message in self.got]


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    hook = Webhook()
    Thread(target=hook.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db", project="default")) as opened:
        yield opened


def add(store: Store, *steps: int) -> None:
    store.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
    for step in steps:
        policy = Policy(f"agent@{step}", "tiny", "0" * 64, "candidate", float(step), None, f"agent@{step - 1}")
        store.ledger.add_candidate(policy, trained_on=[], who="test")


def test_each_kind_of_decision(store: Store, webhook: Webhook):
    notifier, ledger = Notifier(webhook.url(), "shop", store), store.ledger
    add(store, 1, 2, 3)
    notifier.look()
    assert webhook.got == [], "what was decided before anybody asked for messages is old"
    ledger.move("agent@1", "champion", who="job", reason="better\non refunds")
    ledger.move("agent@2", "canary", who="job", reason="try", percent=5.0)
    ledger.move("agent@2", "rejected", who="job", reason="worse")
    ledger.move("agent@0", "champion", who="ada (art-patch rollback)", reason="by hand")
    ledger.move("agent@0", "learner", who="server", reason="worse than upstream", metrics={"control": {"n": 1}})
    ledger.move("agent@3", "champion", who="ada", reason="by hand")
    ledger.move("agent@3", "retired", who="ada", reason="by hand")
    notifier.look()
    notifier.look()
    assert [(each["title"], each["message"], each["type"]) for each in webhook.got] == [
        (f"art_patch shop: {title}", body, kind)
        for title, body, kind in [
            (
                "agent@1 was promoted and serves",
                "better on refunds\nIt was candidate before.\nDecided by job.",
                "success",
            ),
            ("agent@2 was rejected", "worse\nIt was canary before.\nDecided by job.", "warning"),
            (
                "agent@0 serves again",
                "by hand\nIt was retired before.\nDecided by ada (art-patch rollback).",
                "info",
            ),
            ("agent@0 serves no more, upstream answers", "worse than upstream\nDecided by server.", "failure"),
            ("agent@3 was promoted and serves", "by hand\nIt was candidate before.\nDecided by ada.", "success"),
            ("agent@3 serves no more, upstream answers", "by hand\nDecided by ada.", "info"),
        ]
    ]


@contextmanager
def database(kind: str, tmp_path: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/default/store.db"
        return
    server = new_server()
    yield server.url(server.new_database())
    server.end()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_of_many_that_look_one_tells(kind: str, tmp_path: Path, webhook: Webhook):
    with database(kind, tmp_path) as url, closing(open_store(url, project="default")) as store:
        add(store, *range(1, 11))
        stop = Event()

        def run() -> None:
            with closing(open_store(url, project="default")) as own:
                notifier = Notifier(webhook.url(), "default", own)
                while not stop.is_set():
                    notifier.look()

        Notifier(webhook.url(), "default", store).look()
        threads = [Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for step in range(1, 11):
            store.ledger.move(f"agent@{step}", "rejected", who="test", reason="worse")
        until(lambda: len(webhook.got) >= 10)
        stop.set()
        for thread in threads:
            thread.join()
    assert sorted(webhook.titles) == sorted(f"art_patch default: agent@{step} was rejected" for step in range(1, 11))


def test_what_nobody_looked_at_for_a_day_is_old(store: Store, webhook: Webhook):
    add(store, 1)
    notifier = Notifier(webhook.url(), "default", store)
    notifier.look()
    store.ledger.move("agent@1", "champion", who="test", reason="old", now=time.time() - 100_000)
    notifier.look()
    assert webhook.got == []


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What reaches the log of a server or job; pytest's own also has what apprise keeps to itself."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    yield lines
    logging.getLogger().removeHandler(handler)


def test_a_message_that_is_refused_is_logged_once_without_its_address(store: Store, webhook: Webhook, log: list[str]):
    add(store, 1)
    notifier = Notifier(f"{webhook.url('bad')}, {webhook.url()} json://127.0.0.1:9/{TOKEN}", "default", store)
    notifier.look()
    store.ledger.move("agent@1", "champion", who="test", reason="better")
    notifier.look()
    notifier.look()
    assert webhook.titles == ["art_patch default: agent@1 was promoted and serves"]
    first, second = sorted(log)
    what = "the notification 'art_patch default: agent@1 was promoted and serves' was not sent to"
    assert first.startswith(f"{what} JSON (address 1): ") and "403" in first
    assert second.startswith(f"{what} JSON (address 3): ") and "onnection" in second
    assert TOKEN not in first + second


def test_a_wrong_address_is_told_by_its_place(store: Store, webhook: Webhook, log: list[str]):
    for wrong in (f"{webhook.url()} slack://{TOKEN}/x", f"{webhook.url()},nonsense://{TOKEN}"):
        with pytest.raises(ConfigError, match=r"^address 2 in ART_PATCH_NOTIFY") as error:
            addresses(wrong)
        assert TOKEN not in str(error.value)
        notifier = Notifier(wrong, "default", store)
        assert not notifier.is_on
    assert [line.partition(" in ")[0] for line in log] == ["no notification is sent: address 2"] * 2


def test_do_not_switch_is_told_when_the_verdict_turns(tmp_path: Path, store: Store, webhook: Webhook):
    add(store, 1)
    store.ledger.move("agent@1", "champion", who="test", reason="better")
    settings = load_settings(home=tmp_path, notify=webhook.url())
    tell_people(store, settings, {"outcome": "nothing to do"})
    assert webhook.got == []
    at = time.time() - 3_600
    for side, policy, reward in (("u", None, 0.9), ("o", "agent@1", 0.1)):
        for number in range(60):
            run = f"{side}{number}"
            call = Call(f"{run}-1", run, at, "gpt-5", (asked("fig"),), policy=policy)
            store.write(
                [TrajectoryInfo(run, at), call, Score(f"{run}-s", run, "reward", reward + number % 3 / 30, "user", at)]
            )
    for _ in range(2):
        tell_people(store, settings, {"outcome": "waits for approval", "candidate": "agent@2", "reason": "it won"})
    assert webhook.titles == [
        "art_patch default: agent@2 waits for approval",
        "art_patch default: do not switch: upstream is the better choice now",
    ]
    assert "`art-patch report`" in webhook.got[1]["message"]


def test_more_decisions_than_are_claimed_at_once(store: Store):
    notices = store.notices
    assert notices.claim_moves(since=0.0) in ([], None)
    add(store, *range(1, 251))
    told: list[str] = []
    while (moves := notices.claim_moves(since=0.0)) is not None:
        told += [move["policy"] for move in moves]
        assert len(moves) <= 100
    assert told == ["agent@0", "agent@0", *(f"agent@{step}" for step in range(1, 251))]


def test_a_learner_that_served_before_serves_again(store: Store, webhook: Webhook):
    notifier, ledger = Notifier(webhook.url(), "shop", store), store.ledger
    add(store, 1)
    notifier.look()
    ledger.move("agent@0", "learner", who="ada", reason="upstream")
    ledger.move("agent@0", "champion", who="ada", reason="rollback --to")
    notifier.look()
    assert [(each["title"], each["type"]) for each in webhook.got] == [
        ("art_patch shop: agent@0 serves no more, upstream answers", "info"),
        ("art_patch shop: agent@0 serves again", "info"),
    ]


class Hanging:
    """A server that takes a request, and answers a byte at a time or without end; it may be asked to go elsewhere."""

    def __init__(self, answer: bytes, goes_on: bytes) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.asked, self._answer, self._goes_on = 0, answer, goes_on
        Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.socket.getsockname()[1]}/{TOKEN}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self.socket.accept()
                self.asked += 1
                Thread(target=self._speak, args=(caller,), daemon=True).start()

    def _speak(self, caller: socket.socket) -> None:
        with suppress(OSError), caller:
            caller.recv(1 << 16)
            caller.sendall(self._answer)
            while self._goes_on:
                caller.sendall(self._goes_on)
                time.sleep(0.2 if len(self._goes_on) < 100 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [b"x", b"x" * 1_000_000], ids=["drips", "floods"])
def test_a_service_whose_answer_never_ends_holds_up_nobody(
    store: Store, webhook: Webhook, log: list[str], goes_on: bytes
):
    hanging = Hanging(b"HTTP/1.1 200 OK\r\n\r\n", goes_on)
    add(store, 1, 2)
    notifier = Notifier(f"{hanging.url} {webhook.url()}", "default", store)
    notifier.look()
    for step in (1, 2):
        store.ledger.move(f"agent@{step}", "rejected", who="test", reason="worse")
    notifier.look()
    hanging.socket.close()
    assert webhook.titles == [f"art_patch default: agent@{step} was rejected" for step in (1, 2)]
    assert [line for line in log if TOKEN in line] == []
    assert all("was not sent to JSON (address 1): " in line for line in log)
    if len(goes_on) == 1:
        assert (hanging.asked, len(log)) == (1, 1)
        assert log[0].endswith(f"{SILENT}; nor were 1 more")


def test_what_is_quoted_in_an_address_is_hidden_too(webhook: Webhook):
    setting = f"json://ada:p%40ss%2Fword@127.0.0.1:{webhook.server.server_port}/bad/sec%20ret%21%21"
    (address,) = addresses(setting)
    said = str(address.send(of_test("shop")))
    assert "403" in said and not [part for part in ("p@ss", "word", "sec ret") if part in said]
    assert address._hidden("p@ss/word at sec ret!!") == "*** at ***"


def test_the_command_that_tries_it(webhook: Webhook):
    def notify(setting: str, *options: str) -> Any:
        return CliRunner().invoke(app, ["notify", *options], env={"ART_PATCH_NOTIFY": setting, "COLUMNS": "200"})

    result = notify(webhook.url(), "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (
        0,
        {"project": "default", "addresses": [{"address": "JSON (address 1)", "sent": True, "cause": None}]},
    )
    result = notify(f"{webhook.url()} {webhook.url('bad')}")
    assert result.exit_code == 17
    assert result.stdout.splitlines()[0] == "sent JSON (address 1)"
    assert result.stdout.splitlines()[1].startswith("not sent JSON (address 2): ")
    assert TOKEN not in result.output
    assert webhook.titles == ["art_patch default: this is a test"] * 2
    assert isinstance(notify("").exception, ConfigError)


def test_a_retrain_ends_as_without_messages(tmp_path: Path, store: Store, webhook: Webhook):
    """It tells of what was decided; a hook that refuses changes neither its result nor its exit code."""
    add(store, 1, 2)
    for policy in ("agent@0", "agent@1"):
        result = art_patch("retrain", "--json", home=tmp_path, ART_PATCH_NOTIFY=webhook.url())
        assert (result.returncode, json.loads(result.stdout)["outcome"]) == (0, "nothing to do"), result.stderr
        store.ledger.move(policy, "retired" if policy == "agent@0" else "rejected", who="ada", reason="by hand")
    result = art_patch("retrain", "--json", home=tmp_path, ART_PATCH_NOTIFY=webhook.url("bad"))
    assert (result.returncode, json.loads(result.stdout)["outcome"]) == (0, "nothing to do"), result.stderr
    assert webhook.titles == ["art_patch default: agent@0 serves no more, upstream answers"]
    (line,) = warned(result.stderr).splitlines()
    assert line.startswith(
        "the notification 'art_patch default: agent@1 was rejected' was not sent to JSON (address 1): "
    )
    assert TOKEN not in result.stderr


@pytest.mark.slow
def test_two_servers_tell_of_a_promotion_once(
    tmp_path: Path, base: Path, webhook: Webhook, monkeypatch: pytest.MonkeyPatch
):
    sha256 = base_fingerprint(base)
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db", project="default")) as store:
        store.ledger.add_base("agent@0", str(base.absolute()), sha256, who="test")
        path = make_tiny_adapter(tmp_path / "default" / "adapters", base, "agent", 1)
        candidate = Policy("agent@1", str(base.absolute()), sha256, "candidate", 1.0, str(path), "agent@0")
        store.ledger.add_candidate(candidate, trained_on=[], who="test")
    monkeypatch.setitem(ENVIRONMENT, "ART_PATCH_NOTIFY", f"{webhook.url()} {webhook.url('bad')}")
    first, second = Serving(base, tmp_path), Serving(base, tmp_path)
    try:
        time.sleep(5.0)  # both have looked
        assert art_patch("promote", "agent@1", "--json", home=tmp_path).returncode == 0
        until(lambda: webhook.got)
        assert art_patch("rollback", "--json", home=tmp_path).returncode == 0
        until(lambda: len(webhook.got) == 2)
        time.sleep(5.0)
    finally:
        (_, said), (_, also_said) = first.stop(), second.stop()
    assert webhook.titles == [
        "art_patch default: agent@1 was promoted and serves",
        "art_patch default: agent@0 serves again",
    ]
    lines = warned(said + also_said).splitlines()
    assert len([line for line in lines if "was not sent to JSON (address 2)" in line]) == 2, lines
    assert TOKEN not in said + also_said
