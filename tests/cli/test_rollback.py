"""`rollback` beside an engine that does not answer: the route turns before anybody asks it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from art_patch import promotion
from art_patch.cli.commands.policies import rollback
from art_patch.errors import EngineError
from art_patch.store import open_store, read_route
from art_patch.types import Policy


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A store in which a canary is tested."""
    url = f"sqlite:///{tmp_path}/default/store.db"
    with closing(open_store(url)) as store:
        store.ledger.add_base("agent@0", "base", "0" * 64, who="test")
        canary = Policy("agent@1", "base", "0" * 64, "candidate", time.time(), "nowhere", "agent@0")
        store.ledger.add_candidate(canary, trained_on=[], who="test")
        store.ledger.move("agent@1", "canary", percent=5, who="test", reason="try it")
    yield url


def test_a_canary_is_given_up_before_the_engine_is_asked(url: str, capsys: pytest.CaptureFixture[str]):
    challengers: list[str | None] = []

    def hear() -> None:
        with closing(listener.accept()[0]):  # and closes it again without a word
            challengers.append(read_route(url).challenger)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=hear)
        thread.start()
        with closing(open_store(url)) as store:
            store.ledger.set_engine(f"http://127.0.0.1:{listener.getsockname()[1]}", who="test")
        rollback(store=url, as_json=True)
        thread.join()
    assert json.loads(capsys.readouterr().out) == {
        "champion": "agent@0", "test_ended": "agent@1", "rejected": "agent@1", "was": "agent@0", "rewards": {},
        "apps": 0, "dry_run": False,
    }  # fmt: skip
    assert challengers == [None]


def test_a_canary_that_a_server_promotes_meanwhile_does_not_stay(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Between the look at who is tested and the end of the test."""
    give_up = promotion.give_up

    def too_late(*arguments: Any, **more: Any) -> str | None:
        with closing(open_store(url)) as server:
            server.ledger.move("agent@1", "champion", who="server", reason="it has won")
        return give_up(*arguments, **more)

    monkeypatch.setattr(promotion, "give_up", too_late)
    rollback(store=url, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["champion"], told["rejected"], read_route(url).champion) == ("agent@0", None, "agent@0")


def test_a_canary_is_given_up_although_the_engines_key_is_gone(url: str, capsys: pytest.CaptureFixture[str]):
    with closing(open_store(url)) as store:
        store.ledger.set_engine("http://127.0.0.1:9", key_file="/nowhere", who="test")
    rollback(store=url, as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "champion": "agent@0", "test_ended": "agent@1", "rejected": "agent@1", "was": "agent@0", "rewards": {},
        "apps": 0, "dry_run": False,
    }  # fmt: skip


def test_an_error_behind_the_end_of_a_test_says_that_it_has_ended(url: str, monkeypatch: pytest.MonkeyPatch):
    """`--to` ends the test first; what comes behind it may fail."""
    with closing(open_store(url)) as store:
        earlier = Policy("agent@2", "base", "0" * 64, "candidate", time.time(), "nowhere", "agent@0")
        store.ledger.move("agent@1", "rejected", who="test", reason="another one first")
        store.ledger.add_candidate(earlier, trained_on=[], who="test")
        store.ledger.move("agent@2", "champion", who="test", reason="better")
        later = Policy("agent@3", "base", "0" * 64, "candidate", time.time(), "nowhere", "agent@2")
        store.ledger.add_candidate(later, trained_on=[], who="test")
        store.ledger.move("agent@3", "canary", percent=5, who="test", reason="try it")

    def failing(*_: Any, **__: Any) -> None:
        raise EngineError("the engine does not load agent@0")

    monkeypatch.setattr(promotion, "rollback", failing)
    said = r"^the test of agent@3 has ended, but agent@0 does not answer yet: the engine does not load agent@0$"
    with pytest.raises(EngineError, match=said):
        rollback(store=url, to="agent@0")
    assert (read_route(url).champion, read_route(url).challenger) == ("agent@2", None)
    with pytest.raises(EngineError, match=r"^the engine does not load agent@0$"):
        rollback(store=url, to="agent@0")
