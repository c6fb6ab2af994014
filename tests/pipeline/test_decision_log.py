"""The log of decisions, whoever makes them, however many, and whatever becomes of the store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from art_patch._lib.events import written
from art_patch.pipeline import DecisionLog
from art_patch.store import Store, open_store
from art_patch.types import Policy


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(f"sqlite:///{tmp_path}/store.db")) as opened:
        opened.ledger.add_base("agent@0", "tiny", "0" * 64, who="test", now=1.0)
        yield opened


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Kinds of decisions with their policies; the list grows by `take`."""
    with written(), caplog.at_level(logging.INFO, "art_patch"):
        yield []


def taken(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        f"{record.facts['event']} {record.facts['policy']}"
        for record in caplog.records
        if hasattr(record.facts, "get") and "policy" in record.facts
    ]  # type: ignore[attr-defined]
    caplog.clear()
    return found


def add(store: Store, *steps: int, at: float = 2.0) -> None:
    for step in steps:
        policy = Policy(f"agent@{step}", "tiny", "0" * 64, "candidate", at, None, "agent@0")
        store.ledger.add_candidate(policy, trained_on=[], who="test")


def test_more_decisions_than_a_look_reads_at_once(store: Store, told: list[str], caplog: pytest.LogCaptureFixture):
    log = DecisionLog(store.ledger)
    add(store, *range(1, 131))
    log.look()
    assert taken(caplog) == [f"decision agent@{step}" for step in range(1, 131)]
    log.look()
    assert taken(caplog) == []


def test_who_is_gone_back_to_is_no_promotion(store: Store, told: list[str], caplog: pytest.LogCaptureFixture):
    add(store, 1)
    ledger, log = store.ledger, DecisionLog(store.ledger)
    ledger.move("agent@1", "champion", who="job", reason="better", now=3.0)
    ledger.move("agent@0", "champion", who="ada", reason="back", now=4.0)
    ledger.move("agent@0", "learner", who="ada", reason="upstream", now=5.0)
    ledger.move("agent@0", "champion", who="ada", reason="rollback --to", now=6.0)
    log.look()
    assert taken(caplog) == [
        "promotion agent@1", "decision agent@0", "rollback agent@0", "decision agent@1", "decision agent@0",
        "rollback agent@0",
    ]  # fmt: skip


def test_decisions_in_a_store_that_was_put_back(
    tmp_path: Path, store: Store, told: list[str], caplog: pytest.LogCaptureFixture
):
    backup = tmp_path / "backup.db"
    store.maintain.backup(backup)
    log = DecisionLog(store.ledger)
    add(store, *range(1, 6))
    log.look()
    assert len(taken(caplog)) == 5
    with closing(open_store(f"sqlite:///{backup}")) as restored:
        log._ledger = restored.ledger  # what a server's connection finds after its database was put back
        log.look()
        assert taken(caplog) == []
        add(restored, 7, 8, at=9.0)
        log.look()
        assert taken(caplog) == ["decision agent@7", "decision agent@8"]
        add(restored, 9, at=10.0)
        log.look()
        log.look()
        assert taken(caplog) == ["decision agent@9"]
