"""Whether it is worth it: metrics worked out by hand, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.insights import Report, make_report
from art_patch.insights.switch_advice import (
    Comparison,
    Money,
    Side,
    compare_judged,
    compare_rewards,
    count_money,
    difference_interval,
    prompts_needed,
    quantile,
)
from art_patch.types import RunValue, Served, UpstreamChange, Usage

WEEK_S = 7 * 86_400.0
PRICES = {"gpt-5": (2.0, 10.0)}.get


def served(policy: str | None, calls: int = 200, failed: int = 0, ms: float = 100.0, **changes: Any) -> Served:
    tokens = changes.pop("tokens", {"gpt-5": (calls * 1_000, calls * 100)})
    return Served(policy, calls, failed, (ms,) * (calls - failed), tokens, **changes)


def rewarded(policy: str | None, good: int, bad: int) -> list[RunValue]:
    return [RunValue(policy, reward=1.0)] * good + [RunValue(policy, reward=0.0)] * bad


def judged(pairs: Sequence[tuple[float, float]]) -> list[RunValue]:
    """Groups in which the champion got the first and upstream the second."""
    return [
        RunValue(policy, judged=value, group_id=f"g{index}", copy=policy is not None)
        for index, pair in enumerate(pairs)
        for policy, value in zip(("a@2", None), pair, strict=True)
    ]


def usage(runs: Sequence[RunValue] = (), **changes: Any) -> Usage:
    values: dict[str, Any] = {
        "since": 0.0,
        "until": WEEK_S,
        "champion": "a@2",
        "mode": "canary",
        "served": (served("a@2"), served(None)),
        "engine_s": WEEK_S,
        "runs": tuple(runs),
    }
    return Usage(**(values | changes))


def report(runs: Sequence[RunValue] = (), gpu: float | None = 0.0, **changes: Any) -> Report:
    return make_report(usage(runs, **changes), PRICES, gpu_usd_per_hour=gpu)


def test_the_interval_is_that_of_agresti_and_caffo():
    """9 of 10 against 5 of 10: 10/12 - 6/12, and 1.95996 times the root of (10/12 * 2/12 + 6/12 * 6/12) / 12."""
    found = difference_interval([1.0] * 9 + [0.0], [1.0] * 5 + [0.0] * 5)
    assert found == pytest.approx((-0.019500, 0.686167), abs=1e-6)


VALUES = st.lists(st.floats(-3, 3), min_size=1, max_size=40)


@given(VALUES, VALUES)
def test_an_interval_is_never_empty_and_turns_round_with_its_sides(ours: list[float], theirs: list[float]):
    low, high = difference_interval(ours, theirs)
    assert low < high
    assert difference_interval(theirs, ours) == pytest.approx((-high, -low))


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 5.0), (0.51, 6.0), (0.95, 10.0), (0.9, 9.0), (1.0, 10.0)]
)
def test_quantiles_are_values_that_were_seen(share: float, expected: float):
    assert quantile([float(value) for value in range(1, 11)], share) == expected
    assert quantile([], share) is None


def test_rewards_are_compared_over_all_runs_and_nothing_else_is():
    runs = rewarded("a@2", 24, 6) + rewarded(None, 15, 15) + rewarded("a@1", 0, 9) + [RunValue("a@2"), RunValue(None)]
    # A copy of a run has the run's own rewards.
    runs += [replace(run, copy=True) for run in runs[:9]]
    found = compare_rewards(runs, "a@2")
    assert (found.kind, found.ours, found.theirs, found.ours_scored, found.theirs_scored) == (
        "reward",
        0.8,
        0.5,
        30,
        30,
    )
    assert found.difference == pytest.approx(0.3)
    # (25/32 - 16/32) -+ 1.95996 * sqrt((25/32 * 7/32 + 16/32 * 16/32) / 32)
    assert (found.low, found.high) == pytest.approx((0.056468, 0.506032), abs=1e-6)


def test_too_few_runs_have_means_and_no_limits_and_none_is_no_zero():
    assert compare_rewards(rewarded("a@2", 29, 0) + rewarded(None, 0, 99), "a@2") == Comparison(
        "reward", 1.0, 0.0, 29, 99
    )
    assert compare_rewards([RunValue("a@2"), RunValue(None)], "a@2") == Comparison("reward", None, None, 0, 0)
    assert compare_rewards(rewarded(None, 1, 1), None) == Comparison("reward", None, 0.5, 0, 2)
    assert compare_rewards([], "a@2").difference is None


def test_the_judges_scores_are_compared_within_groups_only():
    runs = judged([(0.8, 0.6), (0.4, 0.4)])
    runs += [RunValue("a@2", judged=0.0, group_id="g0"), RunValue("a@2", judged=1.0, group_id="alone")]
    runs += [RunValue(None, judged=1.0, group_id="alone too"), RunValue("a@1", judged=1.0, group_id="g1")]
    found = compare_judged(runs, "a@2")
    assert (found.ours, found.theirs, found.ours_scored, found.low) == (0.4, 0.5, 2, None)
    assert compare_judged(runs, None) == Comparison("judged", None, None, 0, 0)
    enough = compare_judged(judged([(0.9, 0.5)] * 12), "a@2")
    assert (enough.difference, enough.low, enough.high) == pytest.approx((0.4, 0.4, 0.4))
    many = compare_judged(judged([(0.0, 1.0)] * 500 + [(0.9, 0.5)] * 1_000), "a@2")
    assert (many.ours_scored, many.ours, many.low) == pytest.approx((1_000, 0.9, 0.4)), (
        "mean and limits are of the same"
    )


def test_money_by_hand():
    """2 and 0.2 million tokens of ours, half of that upstream; 4 hours of the engine, half an hour of updates."""
    one = usage(
        served=(
            served("a@2", tokens={"gpt-5": (1_500_000, 200_000)}),
            served("a@1", tokens={"gpt-5": (500_000, 0)}),
            served(None, tokens={"gpt-5": (1_000_000, 100_000)}),
        ),
        engine_s=4 * 3_600.0,
        judge_usd=0.5,
        updates=2,
        update_s=1_800.0,
    )
    money = count_money(one, PRICES, gpu_usd_per_hour=0.5)
    assert money == Money(upstream_usd=3.0, avoided_usd=6.0, gpu_usd=2.0, judge_usd=0.5, training_usd=0.25)
    assert (money.spent_usd, money.saved_usd, money.saved_if_all_usd) == (2.75, 3.25, 6.25)


def test_updates_in_vain_are_paid_for_and_named():
    money = count_money(usage(update_s=7_200.0, updates_lost=3), PRICES, gpu_usd_per_hour=0.5)
    assert money.training_usd == 1.0
    assert money.notes == ("updates that made no policy: 3; the time that they took counts",)
    assert count_money(usage(update_s=7_200.0, updates_lost=3), PRICES, gpu_usd_per_hour=None).training_usd is None


def test_what_is_not_known_is_none_and_named():
    one = usage(
        served=(served("a@2", 3, unmetered=3, tokens={"mine": (1, 1)}), served(None, 1)),
        engine_s=None, judge_usd=0.75, judge_unpriced=4, updates=2, updates_untimed=1,
    )  # fmt: skip
    money = count_money(one, PRICES, gpu_usd_per_hour=1.0)
    assert (money.upstream_usd, money.avoided_usd, money.judge_usd, money.training_usd) == (0.003, None, None, None)
    assert (money.gpu_usd, money.spent_usd, money.saved_usd, money.saved_if_all_usd) == (168.0, None, None, None)
    assert [note.split(":")[0] for note in money.notes] == [
        "no price is known for mine",
        "3 answered calls tell no tokens; they count as if they were free",
        "no engine told since when it serves",
        "4 calls of the judge have no known price, at least $0.75",
        "1 of 2 updates do not say how long they took",
    ]
    unknown = count_money(usage(), PRICES, gpu_usd_per_hour=None)
    assert (unknown.gpu_usd, unknown.training_usd, unknown.saved_usd) == (None, 0.0, None)
    assert "--gpu-usd-per-hour" in unknown.notes[0]


BETTER = rewarded("a@2", 190, 10) + rewarded(None, 150, 50)
EQUAL = rewarded("a@2", 1_500, 500) + rewarded(None, 1_500, 500)
WORSE = rewarded("a@2", 100, 100) + rewarded(None, 180, 20)
UNCLEAR = rewarded("a@2", 20, 20) + rewarded(None, 20, 20)


def test_how_many_scores_prove_that_nothing_is_lost():
    equal = rewarded("a@2", 200, 200) + rewarded(None, 200, 200)
    needed = prompts_needed(compare_rewards(equal, "a@2"), 0.05)
    assert needed == pytest.approx(1_568, rel=0.02)  # (1.96 + 0.84)^2 * 2 * 0.25 / 0.05^2
    assert prompts_needed(compare_rewards(WORSE, "a@2"), 0.05) is None
    assert prompts_needed(compare_rewards([], "a@2"), 0.05) is None


@pytest.mark.parametrize(
    ("runs", "gpu", "verdict", "words"),
    [
        (BETTER, 0.0, "switch", ["better", "would have saved $1.20"]),
        (BETTER, None, "switch", ["better", "on quality alone"]),
        (BETTER, 1.0, "switch", ["better", "would have cost $166.80 more", "it pays in quality only"]),
        (EQUAL, 0.0, "switch", ["as good, not worse by more than 0.05", "would have saved"]),
        (EQUAL, None, "switch", ["as good", "what it costs is not known"]),
        (EQUAL, 1.0, "do not switch", ["as good", "would have cost $166.80 more"]),
        (WORSE, 0.0, "do not switch", ["worse by more than the largest loss of 0.05"]),
        (UNCLEAR, 0.0, "not enough data", ["it may be worse by more than 0.05;", "if it is as it looks, about"]),
        (rewarded(None, 99, 1), 0.0, "not enough data", ["0 of its runs and 100 of upstream's", "30 each are needed"]),
        (judged([(0.9, 0.5)] * 12), 0.0, "switch", ["by the judge's scores", "+0.400, between +0.400 and +0.400"]),
        (judged([(0.5, 0.9)] * 12), 0.0, "do not switch", ["worse"]),
        (judged([(0.9, 0.5)] * 11), 0.0, "not enough data", ["11 groups were judged", "12 are needed"]),
    ],
)
def test_a_verdict_and_its_reasons(runs: list[RunValue], gpu: float | None, verdict: str, words: list[str]):
    told = report(runs, gpu)
    assert told.verdict == verdict
    for word in words:
        assert word in "; ".join(told.reasons)


def test_people_come_before_the_judge():
    assert report(WORSE + judged([(0.9, 0.5)] * 20)).verdict == "do not switch"


def test_a_champion_that_fails_more_often_is_not_switched_to():
    sides = (served("a@2", 200, 20), served(None, 200, 2))
    told = report(BETTER, served=sides)
    assert (told.verdict, told.reasons) == (
        "do not switch",
        ("10.0% of its calls fail, 1.0% of upstream's: more than chance explains",),
    )
    assert report(BETTER, served=(served("a@2", 99, 20), served(None, 200, 2))).verdict == "switch"
    assert report(BETTER, served=(served("a@2", 200, 6), served(None, 200, 2))).verdict == "switch"


def test_what_upstreams_earlier_model_did_decides_nothing():
    change = {"upstream_change": UpstreamChange("gpt-5", "m-1", "m-2", 9.0), "outdated": 7}
    calls = (served("a@2", ms=100.0), served(None, 400, 100, ms=20.0))
    told = report(BETTER, served=calls, upstream_now=served(None, 200, 0, ms=90.0), **change)
    assert (told.verdict, told.cautions) == ("switch", ())
    assert (told.upstream_change, told.outdated) == (change["upstream_change"], 7)
    assert told.sides[-1].calls == 400  # the table is of the whole time
    worse = report(BETTER, served=(served("a@2", 200, 20), *calls[1:]), upstream_now=served(None, 200, 0), **change)
    assert worse.reasons == ("10.0% of its calls fail, 0.0% of upstream's: more than chance explains",)
    few = report(BETTER, served=(served("a@2", 200, 20), *calls[1:]), upstream_now=served(None, 99, 0), **change)
    assert few.verdict == "switch"


def test_without_a_champion_there_is_nothing_to_switch_to():
    told = report(rewarded(None, 99, 1), champion=None, served=(served(None, 50),))
    assert (told.verdict, told.unscored) == ("not enough data", {"upstream": 0})
    assert told.reasons == ("no policy serves; start `art-patch serve --base MODEL`, or promote one that was retired",)
    assert told.sides == (
        Side("no champion", 0, 0.0, None, None, None), Side("upstream", 50, 1.0, 0.0, 100.0, 100.0)
    )  # fmt: skip


def test_nothing_recorded_has_no_shares():
    told = report(served=(), runs=[])
    assert (told.verdict, told.fell_back) == ("not enough data", None)
    assert told.sides[0] == Side("a@2", 0, None, None, None, None)


def test_sides_fallbacks_and_what_nobody_scored():
    sides = (served("a@2", 60, 3), served(None, 30), served("a@1", 5, ms=7.0), served("a@0", 5, 1, ms=9.0))
    runs = [RunValue("a@2"), RunValue("a@2", copy=True), RunValue("a@1"), RunValue(None), RunValue(None, reward=1.0)]
    told = report(runs, served=sides, fell_back={"timeout": 20, "HTTP 500": 10}, mixed=4)
    assert told.sides == (
        Side("a@2", 60, 0.6, 0.05, 100.0, 100.0),
        Side("other policies", 10, 0.1, 0.1, 7.0, 9.0),
        Side("upstream", 30, 0.3, 0.0, 100.0, 100.0),
    )
    assert (told.fell_back, told.unscored, told.mixed) == (0.3, {"champion": 1, "upstream": 1}, 4)
    assert told.cautions == ("30% of the calls meant for our policies went upstream after all",)


def test_what_to_know_before_one_believes_it():
    told = report(BETTER, mode="route", served=(served("a@2", ms=300.0), served(None)))
    assert told.verdict == "switch"
    assert told.cautions == (
        "its slow answers (p95) take 3.0 times as long as upstream's",
        "who answered was not drawn by lot, so the runs may differ; `art-patch mode canary` draws",
    )
    assert report(BETTER).cautions == ()
