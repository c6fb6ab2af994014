"""What metrics ask of a store: how each policy has answered lately, and counts that no deletion lowers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from art_patch.store import Store
from art_patch.store.queries.series import Totals
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
        Recent("agent@1", 14, 0, 500.0, 42, 42, runs=6, known=6, succeeded=4, rewarded=6, reward=sum(rewards) / 3),
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


def test_what_was_spent_is_what_the_whole_report_counts(store: Store):
    fill(store)
    store.write([
        Call("m-1", "b0", 1_900.0, "gpt-6", (asked("fig"),), policy="agent@1", prompt_tokens=7, completion_tokens=5),
        Call("m-2", "b0", 1_901.0, "gpt-6", (asked("fig"),), policy="agent@1"),  # its server told no tokens
        Call("m-3", "b0", 1_902.0, "gpt-5", (asked("fig"),), status="error", error="x", prompt_tokens=9),
    ])  # fmt: skip
    store.ledger.add_judgement(Judgement("j-a", "group-a", 1_300.0, "judge", "rubric", "score", "ok", None, 2))
    for since, until in ((0.0, 9e9), (1_100.0, 1_902.0), (8e9, 9e9)):
        whole, spent = (ask(since=since, until=until) for ask in (store.reports.usage, store.reports.spent))
        assert {each.policy: replace(each, latencies_ms=()) for each in whole.served} == {
            each.policy: each for each in spent.served
        }
        for name in ("judge_usd", "judge_unpriced", "updates", "update_s", "engine_s", "since", "until"):
            assert getattr(spent, name) == getattr(whole, name)


def test_how_many_calls_came_when(store: Store):
    fill(store)
    at = sorted(call.started_at for run in store.read.recent(limit=100) for call in run.calls)
    middle = at[len(at) // 2]
    before = sum(each < middle for each in at)
    assert store.series.written((0.0, middle, 9e9)) == (before, len(at) - before)
    assert store.series.written((0.0,)) == ()


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


def test_how_much_was_recorded_in_all(store: Store):
    fill(store)
    store.write([
        Call("m-1", "b0", 1_900.0, "gpt-5", (asked("fig"),), status="error", error="x", fallback="timeout"),
        TrajectoryInfo("copy", 1_500.0, "shadow"),
        Call("s-1", "copy", 1_500.0, "gpt-5", (asked("fig"),), policy="agent@1", shadow_of="m-1"),
        TrajectoryInfo("silent", 1_950.0, "explicit"),
    ])  # fmt: skip
    counts = store.read.counts()
    whole = store.series.totals()
    assert (whole.calls, whole.calls_by_policy) == (counts["calls"], counts["calls_by_policy"])
    assert (whole.calls_fell_back, whole.calls_not_ok) == (counts["calls_fell_back"], counts["calls_not_ok"]) == (1, 2)
    assert (whole.runs, whole.scenarios) == (counts["trajectories"], counts["scenarios"])
    for moment in (1.0, 1_300.0, 1_500.0, 1_900.0, 1_950.0, 9e9):
        assert store.series.totals(until=moment) + store.series.totals(since=moment) == whole
    own = [call for run in store.read.recent(limit=100) for call in run.calls if call.shadow_of is None]
    assert store.series.totals(since=1_900.0).calls == sum(call.started_at >= 1_900.0 for call in own)
    assert store.series.totals(since=9e9) == Totals(0, 0, 0, 0, 0, 0)
