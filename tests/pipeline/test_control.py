"""The control group over a real store: a champion that is proven worse than upstream leaves the calls to it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.errors import EngineError
from art_patch.pipeline import control_once, promote_policy, watch
from art_patch.promotion import CanaryConfig, look_in_words
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Policy, Score, TrajectoryInfo

OLD, NEW = "agent@0", "agent@1"
DAY = 86_400.0
CONFIG = CanaryConfig()


def project(directory: Path, *, control: float, since: float) -> Store:
    """A champion of its second step, promoted then."""
    store = open_store(f"sqlite:///{directory}/store.db")
    store.ledger.set_control_group(control, who="test", now=since)
    store.ledger.add_base(OLD, "base", "0" * 64, who="test", now=since)
    candidate = Policy(NEW, "base", "0" * 64, "candidate", since, path="agent@1", parent=OLD)
    store.ledger.add_candidate(candidate, trained_on=[], who="test")
    store.ledger.move(NEW, "champion", who="test", reason="it won", now=since)
    return store


def record(
    store: Store,
    *,
    since: float,
    days: float,
    right: float,
    a_day: int = 200,
    control: float = 0.2,
    theirs: float = 0.9,
    model: str | None = None,
) -> None:
    """Sessions of one call: upstream's `model` is right nine times in ten, the champion this often."""
    rng, records = random.Random(0), list[Any]()
    for number in range(int(days * a_day)):
        at, run, kept = since + 60 + number * DAY / a_day, new_id(), rng.random() < control
        only = Choice(0, {"role": "assistant", "content": "three plums"}, "stop")
        records += [
            TrajectoryInfo(run, at, session_id=f"visit {run}"),
            Call(
                id=new_id(), trajectory_id=run, started_at=at, requested_model="m", choices=(only,),
                messages=({"role": "user", "content": "how many?"},), policy=None if kept else NEW,
                duration_ms=100.0, completion_tokens=4, in_control_group=kept,
                answered_by=model if kept else None,
            ),
            Score(new_id(), run, "thumbs", float(rng.random() < (theirs if kept else right)), "user", at + 30),
        ]  # fmt: skip
    store.write(records)


def decided(store: Store) -> str | None:
    """What a look decides after five days."""
    verdict = control_once(store, CONFIG, who="test", now=1_000.0 + 5 * DAY)
    return verdict and verdict.action


def test_a_champion_that_is_worse_leaves_the_calls_to_upstream(tmp_path: Path):
    store = project(tmp_path, control=20, since=1_000.0)
    record(store, since=1_000.0, days=5, right=0.6)
    assert decided(store) == "roll back"
    assert store.ledger.route().champion is None
    last = store.ledger.history(limit=1)[0]
    assert (last["policy"], last["to_state"], last["who"]) == (NEW, "learner", "test")
    assert last["reason"].startswith("worse than upstream, which answers from now on: its people's feedback is worse")
    assert last["metrics"]["control"]["signals"]["feedback"]["says"] == "worse"
    # Nothing is left to compare, and nothing is decided twice.
    assert control_once(store, CONFIG, who="test") is None
    store.close()


def test_an_equal_champion_stays_and_without_a_group_nothing_is_looked_at(tmp_path: Path):
    store = project(tmp_path, control=20, since=1_000.0)
    record(store, since=1_000.0, days=5, right=0.9)
    assert decided(store) == "go on"
    assert store.ledger.route().champion == NEW
    store.ledger.set_control_group(0, who="test")
    assert control_once(store, CONFIG, who="test") is None
    store.close()


def test_a_champion_is_not_held_to_a_model_that_upstream_no_longer_has(tmp_path: Path):
    store = project(tmp_path, control=20, since=1_000.0)
    record(store, since=1_000.0, days=4, right=0.6, model="m-1")
    # The later model is no better than the champion.
    record(store, since=1_000.0 + 4 * DAY, days=1, right=0.6, theirs=0.6, model="m-2")
    assert decided(store) == "go on"
    assert store.ledger.route().champion == NEW
    store.close()


def test_a_champion_that_is_worse_than_upstreams_later_model_is_retired(tmp_path: Path):
    store = project(tmp_path, control=20, since=1_000.0)
    record(store, since=1_000.0, days=1, right=0.9, model="m-1")
    record(store, since=1_000.0 + DAY, days=4, right=0.5, model="m-2")
    assert decided(store) == "roll back"
    assert store.ledger.history(limit=1)[0]["metrics"]["control"]["begin"] > 1_000.0 + DAY
    store.close()


def test_people_see_what_the_newest_look_found_and_how_soon_it_would_notice_a_loss(tmp_path: Path):
    store = project(tmp_path, control=20, since=1_000.0)
    assert store.ledger.control_look() is None
    record(store, since=1_000.0, days=5, right=0.9)
    decided(store)
    look = store.ledger.control_look()
    assert look is not None
    assert (look["policy"], look["at"], look["begin"]) == (NEW, 1_000.0 + 5 * DAY, 1_000.0)
    # By theory, four times the sessions for half the loss.
    soon = look["days_to_notice"]
    assert soon["0.1"] == pytest.approx(4 * soon["0.2"])
    assert 1 < soon["0.2"] < 6
    words = look_in_words(look)
    assert words.startswith("since 1970-01-01, ")
    assert "; feedback " in words
    assert "; not proven worse than upstream; a loss of 0.1 in about " in words
    # Another champion has not been looked at yet, nor has this one since it serves again.
    store.ledger.move(OLD, "champion", who="test", reason="back", now=1_000.0 + 6 * DAY)
    assert store.ledger.control_look() is None
    store.ledger.move(NEW, "champion", who="test", reason="again", now=1_000.0 + 7 * DAY)
    assert store.ledger.control_look() is None
    store.close()


def test_whoever_watches_acts(tmp_path: Path):
    since = time.time() - 5 * DAY
    store = project(tmp_path, control=20, since=since)
    record(store, since=since, days=4.9, right=0.6)
    stop = Event()
    thread = Thread(target=lambda: watch(store, None, CONFIG, who="the server", stop=stop, every_s=0.1))
    thread.start()
    until = time.monotonic() + 60
    while store.ledger.route().champion is not None and time.monotonic() < until:
        time.sleep(0.05)
    stop.set()
    thread.join(60)
    assert store.ledger.history(limit=1)[0]["who"] == "the server"
    store.close()


def test_a_test_that_cannot_be_looked_at_hides_no_harm(tmp_path: Path, monkeypatch: Any):
    since = time.time() - 5 * DAY
    store = project(tmp_path, control=20, since=since)
    record(store, since=since, days=4.9, right=0.6)
    stop = Event()

    def fails(*_: Any, **__: Any) -> Any:
        stop.set()
        raise EngineError("the canary has won, and no engine can load it")

    monkeypatch.setattr(promote_policy, "watch_once", fails)
    watch(store, None, CONFIG, who="the server", stop=stop, every_s=0.1)
    assert store.ledger.route().champion is None
    store.close()
