"""Looks after every observation do not inflate errors; large differences are found at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.promotion.evidence import Block, Observation, blocks
from art_patch.promotion.sequential import difference, is_above, lower_bound, slower, upper_bound

RUNS = 200
OBSERVATIONS = 5_000
DIFFERENCES = st.lists(st.floats(-1, 1), max_size=60)


def observed(challenger: float, champion: float, *, seed: int, share: float = 0.5, n: int = OBSERVATIONS):
    """Outcomes 0 and 1 with these chances; the challenger answers a share of the sessions."""
    rng = random.Random(seed)
    for at in range(n):
        ours = rng.random() < share
        yield Observation(at, ours, float(rng.random() < (challenger if ours else champion)))


def gained(challenger: float, champion: float, **how) -> list[float]:
    return [difference(block) for block in blocks(observed(challenger, champion, **how))]


def when_above(differences: list[float], null: float, alpha: float) -> int | None:
    """After how many blocks it is said first."""
    return next((n for n in range(1, len(differences) + 1) if is_above(differences[:n], null, alpha)), None)


def test_blocks_are_as_short_as_they_can_be_and_what_is_left_over_waits():
    seen = [(4, True, 0.4), (1, False, 0.1), (2, False, 0.2), (3, True, 0.3), (5, True, 0.5), (6, False, 0.6)]
    seen.append((7, True, 0.7))
    assert blocks(Observation(*each) for each in seen) == [Block(3, (0.3,), (0.1, 0.2)), Block(6, (0.4, 0.5), (0.6,))]
    assert blocks([]) == blocks([Observation(1, True, 0.5)]) == []


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=60))
def test_every_block_holds_both_arms_and_nothing_is_lost_but_the_end(values: list[tuple[bool, float]]):
    found = blocks(Observation(at, ours, value) for at, (ours, value) in enumerate(values))
    assert all(block.challenger and block.champion for block in found)
    assert all(-1 <= difference(block) <= 1 for block in found)
    for arm, mine in (("challenger", True), ("champion", False)):
        kept = [value for block in found for value in getattr(block, arm)]
        assert kept == [value for ours, value in values if ours is mine][: len(kept)]


@pytest.mark.parametrize(("share", "true"), [(0.5, 0.0), (0.05, 0.03)])
def test_arms_are_hardly_ever_called_more_different_than_they_are(share: float, true: float, record_property):
    alpha = 0.05
    seeds = range(1_000, 1_000 + RUNS)
    wrong = sum(is_above(gained(0.5 + true, 0.5, seed=seed, share=share), true, alpha) for seed in seeds) / RUNS
    name = f"called different: {OBSERVATIONS:,} looks, share {share:.0%}, true difference {true:g}"
    record_property("figure", [name, f"{wrong:.3f}", f"<= {alpha}"])
    assert wrong <= alpha


def test_an_arm_within_the_tolerance_is_never_called_worse(record_property):
    wrong = sum(is_above(gained(0.05, 0.05, seed=seed), 0.03, 0.01) for seed in range(50))
    record_property("figure", ["equal error rates of 5 % called worse by 3 %", f"{wrong / 50:.3f}", "<= 0.01"])
    assert wrong == 0


def test_a_large_regression_is_found_within_few_observations(record_property):
    for rate, limit in ((1.0, 12), (0.3, 100)):
        found = [when_above(gained(rate, 0.02, seed=seed, share=0.05), 0.02, 0.005) for seed in range(30)]
        worst = max(n or OBSERVATIONS for n in found)
        name = f"calls until {rate:.0%} errors are called worse, worst of 30"
        record_property("figure", [name, str(worst), f"<= {limit}"])
        assert worst <= limit


def test_a_better_arm_is_found(record_property):
    found = [when_above(gained(0.75, 0.5, seed=seed, n=1_500), 0.0, 0.025) for seed in range(20)]
    assert None not in found
    middle = sorted(filter(None, found))[10]
    record_property("figure", ["blocks until 75 % against 50 % is proven, median", str(middle), ""])


def test_bounds_hold_the_truth_and_shrink(record_property):
    wide = 2.0
    for n in (100, 500, 2_500):
        values = gained(0.6, 0.5, seed=1, n=n)
        low, high = lower_bound(values, 0.025), upper_bound(values, 0.025)
        assert low < 0.1 < high
        assert high - low < wide
        wide = high - low
        record_property("figure", [f"width of the bounds after {n} observations", f"{wide:.3f}", ""])
    assert (lower_bound([], 0.05), upper_bound([], 0.05)) == (-1.0, 1.0)


def test_what_weighs_on_both_arms_proves_nothing():
    """An engine that is down for a while: all of both arms fails, and the next hour nothing does."""
    rng = random.Random(0)
    seen = [Observation(at, rng.random() < 0.2, float(at % 400 < 100)) for at in range(5_000)]
    values = [difference(block) for block in blocks(seen)]
    assert not is_above(values, 0.0, 0.05)
    assert not is_above([-value for value in values], 0.0, 0.05)


@given(DIFFERENCES, st.floats(-0.9, 0.9), st.floats(-0.9, 0.9), st.floats(0.001, 0.2))
def test_what_is_above_a_number_is_above_every_smaller_one(values, one, other, alpha):
    smaller, larger = sorted((one, other))
    assert is_above(values, smaller, alpha) or not is_above(values, larger, alpha)


@given(DIFFERENCES, st.lists(st.floats(-1, 1), max_size=20), st.floats(-0.9, 0.9))
def test_more_data_takes_nothing_back(values, more, null):
    assert is_above(values + more, null, 0.05) or not is_above(values, null, 0.05)


@given(DIFFERENCES)
def test_a_bound_is_what_the_test_says(values):
    low = lower_bound(values, 0.05)
    assert low == -1 or is_above(values, low, 0.05)
    assert low >= 0.99 or not is_above(values, low + 0.005, 0.05)
    assert upper_bound(values, 0.05) == -lower_bound([-value for value in values], 0.05)


def test_slower_is_told_by_medians_and_a_ratio():
    assert slower(Block(0, (31.0, 30.0, 9_000.0), (20.0,)), 1.5) == 1.0
    assert slower(Block(0, (30.0,), (20.0, 20.0)), 1.5) == 0.0
    assert slower(Block(0, (29.0,), (20.0,)), 1.5) == -1.0


def test_equally_slow_arms_with_a_long_tail_are_not_called_slower(record_property):
    def values(seed: int) -> list[float]:
        rng = random.Random(seed)
        seen = (Observation(at, rng.random() < 0.1, rng.lognormvariate(5, 2)) for at in range(2_000))
        return [slower(block, 1.5) for block in blocks(seen)]

    wrong = sum(is_above(values(seed), 0.0, 0.01) for seed in range(50))
    record_property("figure", ["equal lognormal latencies called slower", f"{wrong / 50:.3f}", "<= 0.01"])
    assert wrong == 0
