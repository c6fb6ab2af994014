"""The bound behind the gate: exact by hand where it can be, and right as often as it promises."""

from __future__ import annotations

import math
import random
from itertools import product
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_patch.gate import lower_bound
from art_patch.gate.paired_test import fewest, scenarios_needed

scores = st.lists(st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 3)), min_size=5, max_size=14)


def test_a_bound_needs_as_many_scenarios_as_coin_throws_that_convince():
    assert [fewest(level) for level in (0.5, 0.9, 0.95, 0.975, 0.99)] == [1, 4, 5, 6, 7]
    assert lower_bound([1.0] * 4, 0.95) == -math.inf
    assert lower_bound([0.3, 0.1, 0.4, 0.2, 0.5], 0.95) == 0.1  # 1 of 32 subset means may lie below


@given(st.lists(st.integers(-3, 3).map(float), min_size=5, max_size=8), st.integers(-2, 2))
@settings(max_examples=100, deadline=None)
def test_it_is_the_sign_flip_test_inverted(differences: list[float], margin: int):
    shifted = [d - margin for d in differences]
    flips = list(product((1, -1), repeat=len(shifted)))
    as_extreme = sum(sum(s * d for s, d in zip(flip, shifted, strict=True)) >= sum(shifted) for flip in flips)
    assert (lower_bound(differences, 0.95) > margin) == (as_extreme / len(flips) <= 0.05)


@given(
    st.lists(st.tuples(st.integers(-3, 3).map(float), st.integers(0, 6)), min_size=5, max_size=20), st.integers(-2, 2)
)
@settings(max_examples=100, deadline=None)
def test_a_user_is_flipped_with_all_of_his_scenarios(drawn: list[tuple[float, int]], margin: int):
    differences, users = [d for d, _ in drawn], [user for _, user in drawn]
    sums = [sum(d - margin for d, user in drawn if user == one) for one in set(users)]
    flips = list(product((1, -1), repeat=len(sums)))
    as_extreme = sum(sum(s * d for s, d in zip(flip, sums, strict=True)) >= sum(sums) for flip in flips)
    bound = lower_bound(differences, 0.95, units=users)
    assert (bound > margin) == (len(sums) >= 5 and as_extreme / len(flips) <= 0.05)
    assert lower_bound(differences, 0.95, units=range(len(drawn))) == lower_bound(differences, 0.95)


@given(scores, st.floats(-1, 1).map(lambda x: round(x, 3)))
@settings(max_examples=60, deadline=None)
def test_it_moves_with_the_scores_and_lies_below_their_mean(differences: list[float], by: float):
    bound = lower_bound(differences, 0.95)
    assert lower_bound([d + by for d in differences], 0.95) == pytest.approx(bound + by, abs=1e-9)
    assert bound <= fmean(differences) + 1e-9 <= -lower_bound([-d for d in differences], 0.95) + 2e-9


@given(scores, st.data())
@settings(max_examples=60, deadline=None)
def test_a_better_score_never_lowers_it(differences: list[float], data: st.DataObject):
    at = data.draw(st.integers(0, len(differences) - 1))
    better = [d + 0.25 * (n == at) for n, d in enumerate(differences)]
    assert lower_bound(better, 0.95) >= lower_bound(differences, 0.95)


@pytest.mark.parametrize("count", [5, 8, 12, 40])
def test_it_is_wrong_no_more_often_than_it_says(count: int):
    rng = random.Random(count)
    wrong = sum(
        lower_bound([rng.choice((-0.5, 0.0, 0.0, 0.0, 0.5)) for _ in range(count)], 0.95, seed=n) > 0
        for n in range(300)
    )
    assert wrong <= 24  # 15 expected at most, and three standard deviations


def test_how_many_scenarios_a_difference_would_take():
    noisy = [0.5, -0.3] * 8
    needed = scenarios_needed(noisy, 0.0, 0.95)
    assert needed is not None and 90 < needed < 115  # ((1.645 + 0.842) * 0.413 / 0.1) ** 2
    assert scenarios_needed(noisy, 0.05, 0.95) > needed  # type: ignore[operator]
    assert scenarios_needed(noisy, 0.2, 0.95) is None
    assert scenarios_needed([-0.1] * 20, 0.0, 0.95) is None
    assert scenarios_needed([0.1] * 3, 0.0, 0.95) == 5
    # Of users who differ, many scenarios of one say no more than one does.
    users = ["likes it", "does not"] * 8
    assert scenarios_needed(noisy, 0.0, 0.95, units=users) > 8 * needed  # type: ignore[operator]
