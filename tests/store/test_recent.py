"""What metrics ask of a store: how each policy has answered lately, and counts that no deletion lowers."""

from __future__ import annotations

from typing import Any

from art_patch.store import Store
from art_patch.store.queries.usage import Recent
from art_patch.types import Call, Judgement, Score, TrajectoryInfo
from tests.support.run_samples import asked, fill, tool_run, write


def test_who_answered_how(store: Store):
    fill(store)
    mixed = tool_run("mixed", "fig", "fig", started_at=1_500.0)
    write(store, mixed)
    store.write([Call("m-3", "mixed", 1_502.0, "gpt-5", (asked("fig"),))])  # and upstream the rest
    rewards = (0.8, 0.1, 0.95)
    assert store.reports.recent(since=0.0) == (
        Recent(None, calls=3, calls_not_ok=1, latency_ms=0.0, runs=2, known=1),
        Recent("agent@1", 14, 0, 500.0, runs=6, known=6, succeeded=4, rewarded=6, reward=sum(rewards) / 3),
    )
    # Users' words count more than a judge's, and the newest of them; a judge's in the run's own group alone.
    store.write([
        Score("new", "b0", "reward", 0.2, "user", 1_400.0),
        Score("foreign", "b1", "ruler", 1.0, "ruler", 1_500.0, group_id="another"),
    ])  # fmt: skip
    ours = store.reports.recent(since=0.0)[1]
    assert (ours.succeeded, round(ours.reward or 0.0, 6)) == (3, round((sum(rewards) * 2 - 0.6) / 6, 6))
    assert store.reports.recent(since=1_900.0) == (
        Recent(None, calls=2, calls_not_ok=1, latency_ms=0.0, runs=2, known=1),
    )
    assert store.reports.recent(since=9_000.0) == ()


def numbers(counts: dict[str, Any]) -> dict[str, float]:
    judge = {f"judge_{name}": value for name, value in counts["judge"].items()}
    gauges = ("scenarios", "last_call_at")
    return {name: value for name, value in counts.items() if isinstance(value, int) and name not in gauges} | judge


def test_deletions_lower_no_count_of_all_time(store: Store):
    fill(store)
    for key, group, cost in (("j-a", "group-a", 0.5), ("j-b", "group-b", None)):
        store.ledger.add_judgement(
            Judgement(key, group, 1_300.0, "judge", "rubric", "score", "ok", None, 2, 100, 10, cost, {})
        )
    before = numbers(store.read.counts())
    assert min(before[name] for name in ("calls", "calls_not_ok", "calls_shadow", "scores", "judge_unpriced")) > 0
    store.rights.erase(user="user-a")
    store.rights.erase(trajectory="failed")
    store.write([TrajectoryInfo("later", 4_000.0), Call("l-1", "later", 4_000.0, "gpt-5", (asked("fig"),))])
    store.rights.prune(keep=0)
    counts, deleted = store.read.counts_and_deleted()
    assert (counts["calls"], counts["trajectories"], counts["judge"]["calls"]) == (0, 0, 0)
    ever = {name: value + deleted.get(name, 0) for name, value in numbers(counts).items()}
    assert ever == before | {name: before[name] + 1 for name in ("calls", "trajectories", "calls_trainable")}
