"""What `art-patch report` is told by the store: every figure worked out by hand, over both databases."""

from __future__ import annotations

import pytest

from art_patch.store import Store
from art_patch.types import (
    Call,
    Group,
    Judgement,
    Policy,
    RunValue,
    Score,
    Served,
    Trajectory,
    TrajectoryInfo,
    UpstreamChange,
    Usage,
)
from tests.support.store_samples import call


def run(store: Store, key: str, *calls: Call, origin: str = "explicit") -> None:
    store.write([TrajectoryInfo(key, calls[0].started_at, origin), *calls])  # type: ignore[arg-type]


def one(key: str, at: float, policy: str | None, **changes: object) -> Call:
    return call(f"{key}-{at:g}", key, at, policy=policy, **changes)


def score(key: str, name: str, value: float, source: str, at: float = 1.0, group: str | None = None) -> Score:
    return Score(f"{key}-{name}-{source}-{at:g}", key, name, value, source, at, group_id=group)


def fill(store: Store) -> None:
    run(store, "early", one("early", 9.0, None))
    run(store, "late", one("late", 20.0, None))
    run(store, "ours", one("ours", 10.0, "agent@1", duration_ms=7.0), one("ours", 11.0, "agent@1", duration_ms=3.0))
    run(store, "theirs", one("theirs", 12.0, None, fallback="timeout", completion_tokens=40))
    run(store, "failed", one("failed", 13.0, None, status="error", error="X: y", choices=()))
    run(store, "cut", one("cut", 13.5, None, status="abandoned", prompt_tokens=0, completion_tokens=0))
    run(store, "mixed", one("mixed", 14.0, "agent@1"), one("mixed", 15.0, None, requested_model="other"))
    run(store, "both", one("both", 16.0, "agent@0"), one("both", 17.0, "agent@1"))
    run(store, "again", one("again", 18.0, "agent@1", shadow_of="theirs-12"), origin="resampled")
    runs = store.read.trajectories(["again", "theirs"])
    store.ledger.add_groups([Group("g", "task", "resampled", tuple(Trajectory(each.info, ()) for each in runs))])
    store.write(
        [
            score("ours", "reward", 0.1, "user", at=1.0),
            score("ours", "reward", 0.9, "user", at=2.0),
            score("ours", "thumbs", 0.0, "user"),
            score("theirs", "ruler", 0.4, "ruler", group="g"),
            score("again", "ruler", 0.6, "ruler", group="g"),
            score("again", "reward", 0.7, "combined", group="g"),
            score("again", "ruler", 0.2, "ruler", at=9.0, group="another"),
        ]
    )


def test_a_stretch_of_time_is_told_whole(store: Store):
    fill(store)
    assert store.reports.usage(since=10.0, until=20.0) == Usage(
        since=10.0,
        until=20.0,
        served=(
            Served(None, 4, 1, (5.0, 5.0), {"gpt-5": (3, 40), "other": (3, 4)}, unmetered=1),
            Served("agent@1", 4, 0, (3.0, 5.0, 5.0, 7.0), {"gpt-5": (12, 16)}),
            Served("agent@0", 1, 0, (5.0,), {"gpt-5": (3, 4)}),
        ),
        fell_back={"timeout": 1},
        runs=(
            RunValue("agent@1", judged=0.7, group_id="g", copy=True),
            RunValue(None),
            RunValue(None),
            RunValue("agent@1", reward=0.9),
            RunValue(None, judged=0.4, group_id="g"),
        ),
        mixed=2,
    )


def test_an_empty_store_tells_nothing(store: Store):
    assert store.reports.usage(since=0.0, until=1e12) == Usage(0.0, 1e12)


def test_values_of_a_model_that_upstream_replaced_are_left_out(store: Store):
    run(store, "then", one("then", 11.0, None, answered_by="m-1", duration_ms=9.0))
    run(store, "ours then", one("ours then", 11.5, "agent@1"))
    run(store, "failed then", one("failed then", 12.5, None, status="error", error="X: y", choices=()))
    run(store, "now", one("now", 15.0, None, answered_by="m-2", duration_ms=3.0))
    run(store, "both", one("both", 12.0, None, answered_by="m-1"), one("both", 16.0, None, answered_by="m-2"))
    store.write([score(key, "reward", 1.0, "user") for key in ("then", "ours then", "both", "now")])
    told = store.reports.usage(since=10.0, until=20.0)
    assert told.upstream_change == UpstreamChange("gpt-5", "m-1", "m-2", 15.0)
    assert told.runs == (RunValue(None, reward=1.0), RunValue("agent@1", reward=1.0))
    assert told.outdated == 3
    assert told.upstream_now == Served(None, 2, 0, (3.0, 5.0), {"gpt-5": (6, 8)})
    # What was paid and answered is told of the whole time.
    assert [(each.policy, each.calls, each.failed) for each in told.served] == [(None, 5, 1), ("agent@1", 1, 0)]
    before = store.reports.usage(since=10.0, until=14.0)
    assert (before.upstream_change, before.upstream_now, before.outdated) == (None, None, 0)
    after = store.reports.usage(since=15.5, until=20.0)  # a run of both models ends in it
    assert (after.upstream_change, after.upstream_now, after.outdated, after.runs) == (None, None, 1, ())


def policy(step: int, at: float, metrics: dict[str, object]) -> Policy:
    return Policy(f"agent@{step}", "/base", "ff", "candidate", at, path=f"/a/{step}", parent="agent@0", metrics=metrics)


def test_what_was_spent(store: Store):
    ledger = store.ledger
    ledger.add_base("agent@0", "/base", "ff", who="t", now=12.0)
    timed = {"train": {"history": [{"seconds": 1.5}, {"seconds": 2.0}]}}
    for step, at, metrics in ((1, 11.0, timed), (2, 12.0, {}), (3, 9.0, timed)):
        ledger.add_candidate(policy(step, at, metrics), trained_on=[], who="t")
    for key, at, calls, usd in (("a", 11.0, 2, 0.25), ("b", 12.0, 3, None), ("c", 13.0, 1, 0.5), ("d", 20.0, 1, 9.0)):
        ledger.add_judgement(Judgement(key, "g", at, "m", "r", "score", "ok", calls=calls, cost_usd=usd))
    ledger.set_mode("canary", who="t")
    told = store.reports.usage(since=10.0, until=20.0)
    assert (told.champion, told.mode) == ("agent@0", "canary")
    assert (told.judge_usd, told.judge_unpriced) == (0.75, 3)
    assert (told.updates, told.update_s, told.updates_untimed, told.updates_lost) == (2, 3.5, 1, 0)


def test_updates_that_made_no_policy_took_their_time_as_well(store: Store):
    def ended(job: str, at: float, took_s: float) -> None:
        store.ledger.note_attempt(job, policy="agent@1", took_s=took_s, why="TrainingError", who="t", now=at)

    ended("failed", 9.0, 100.0)
    ended("failed", 11.0, 20.0)
    ended("failed", 12.0, 3.0)
    ended("out of time", 13.0, 0.5)
    ended("another cycle goes on", 14.0, 8.0)
    ended("after a kill", 15.0, 1.0)
    store.ledger.add_base("agent@0", "/base", "ff", who="t", now=10.0)
    steps = [{"seconds": 4.0}, {"seconds": 3.0}]
    gone_on_with = {"train": {"history": steps, "job": "another cycle goes on", "took_s": 2.0}}
    killed_before = {"train": {"history": steps, "job": "after a kill", "took_s": 5.0}}
    for step, metrics in ((1, gone_on_with), (2, killed_before)):
        store.ledger.add_candidate(policy(step, 19.0, metrics), trained_on=[], who="t")
    told = store.reports.usage(since=10.0, until=20.0)
    assert (told.updates, told.updates_untimed, told.updates_lost) == (2, 0, 2)
    assert told.update_s == 20.0 + 3.0 + 0.5 + (8.0 + 2.0) + 7.0
    assert store.verify() == []


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ([], None),
        ([(1.0, True)], 10.0),
        ([(12.0, True)], 8.0),
        ([(1.0, True), (5.0, False)], 0.0),
        ([(1.0, True), (13.0, False)], 3.0),
        ([(11.0, True), (12.0, True), (14.0, False), (19.0, True)], 4.0),
        ([(25.0, True)], None),
    ],
)
def test_how_long_an_engine_was_there(said: list[tuple[float, bool]], seconds: float | None, store: Store):
    for at, up in said:
        store.ledger.set_engine("http://127.0.0.1:1/v1" if up else None, who="t", now=at)
    assert store.reports.usage(since=10.0, until=20.0).engine_s == seconds
