"""Advantages: numbers worked out by hand, what teaches nothing, and what must hold for every group."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training import advantages_of_groups
from art_patch.training.loss_config import Scale, weights_of_kinds

SCALES: tuple[Scale, ...] = ("group", "batch", "none")


def test_advantages_are_the_z_score_with_ddof_1():
    # mean 0.5, deviations (.5, -.5, .5, -.5), std sqrt(1/3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    (advantages_G,) = advantages_of_groups([[1, 0, 1, 0]])
    assert advantages_G == pytest.approx((expected, -expected, expected, -expected))


def test_each_scale_by_hand():
    groups = [[1.0, 0.0], [0.5, 0.5], [0.0, 0.5]]
    batch = statistics.stdev([1.0, 0.0, 0.5, 0.5, 0.0, 0.5]) + 1e-4  # of the group that teaches nothing, too
    sqrt_half = math.sqrt(0.5)
    a, b = 0.5 / (sqrt_half + 1e-4), 0.25 / (sqrt_half / 2 + 1e-4)
    expected: dict[Scale, list[tuple[float, float]]] = {
        "group": [(a, -a), (-b, b)],
        "batch": [(0.5 / batch, -0.5 / batch), (-0.25 / batch, 0.25 / batch)],
        "none": [(0.5, -0.5), (-0.25, 0.25)],
    }
    for scale, (first, last) in expected.items():
        assert advantages_of_groups(groups, scale) == (pytest.approx(first), None, pytest.approx(last))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.1, 0.1, 0.1], [0.0, 0.0], [None, 0.5], [math.nan, 1.0], [1.0, None]])
def test_what_has_no_spread_teaches_nothing(rewards: list[float | None], scale: Scale):
    other = [1.0, 0.0]
    assert advantages_of_groups([rewards], scale) == (None,)
    assert advantages_of_groups([rewards, other], scale)[0] is None


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", SCALES)
def test_an_unscored_sibling_has_no_advantage_and_does_not_move_the_others(scale: Scale, nothing: float | None):
    scored = advantages_of_groups([[1.0, 0.0], [0.25, 0.5]], scale)
    assert scored[0] is not None and scored[1] is not None
    assert advantages_of_groups([[1.0, nothing, 0.0, nothing], [nothing, 0.25, 0.5], [nothing]], scale) == (
        (scored[0][0], 0.0, scored[0][1], 0.0),
        (0.0, *scored[1]),
        None,
    )


def test_a_spread_within_the_noise_of_the_rewards_teaches_nothing():
    near, far = [0.5, 0.5, 0.5, 0.6], [0.5, 0.5, 0.5, 0.9]  # standard deviations .05 and .2
    assert [a is None for a in advantages_of_groups([near, far], noise=[0.02, 0.02])] == [False, False]
    assert [a is None for a in advantages_of_groups([near, far], noise=[0.03, 0.03])] == [True, False]
    assert [a is None for a in advantages_of_groups([near, near], noise=[0.03, 0.0])] == [True, False]


def test_each_kind_of_group_is_a_batch_of_its_own():
    runs, turns = [[1.0, 0.0], [0.5, 0.0]], [[0.1, 0.0], [0.3, None]]
    mixed = [runs[0], turns[0], runs[1], turns[1]]
    apart = [*advantages_of_groups(runs, "batch"), *advantages_of_groups(turns, "batch")]
    kinds = ["run", "turn", "run", "turn"]
    assert advantages_of_groups(mixed, "batch", kinds=kinds) == (apart[0], apart[2], apart[1], apart[3])


def test_each_kind_has_the_share_of_the_loss_that_it_has_of_the_trajectories():
    weights = weights_of_kinds(["run", "turn", "run"], [4_000, 240, 2_000], [4, 4, 4])
    assert weights == pytest.approx((2 / 3 * 6_240 / 6_000, 1 / 3 * 6_240 / 240, 2 / 3 * 6_240 / 6_000))
    assert weights_of_kinds(["turn", "turn"], [9, 30], [3, 2]) == (1.0, 1.0)
    assert weights_of_kinds([], [], []) == ()


def test_no_groups():
    assert advantages_of_groups([], "batch") == ()


rewards = st.lists(st.floats(0, 1) | st.none() | st.just(math.nan), max_size=12)


@given(st.lists(rewards, max_size=5), st.sampled_from(SCALES))
def test_advantages_of_a_group_sum_to_nothing_keep_the_order_and_are_finite(
    groups: list[list[float | None]], scale: Scale
):
    for group, advantages in zip(groups, advantages_of_groups(groups, scale), strict=True):
        if advantages is None:
            continue
        assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
        scored = [(r, a) for r, a in zip(group, advantages, strict=True) if r is not None and math.isfinite(r)]
        assert all(a == 0.0 for r, a in zip(group, advantages, strict=True) if r is None or math.isnan(r))
        for (r1, a1), (r2, a2) in itertools.combinations(scored, 2):
            assert (r1 < r2) <= (a1 <= a2)


@given(st.floats(0, 1), st.integers(0, 20), st.sampled_from(SCALES))
def test_equal_rewards_are_no_group(reward: float, siblings: int, scale: Scale):
    assert advantages_of_groups([[reward] * siblings, [0.0, 1.0]], scale)[0] is None


@given(st.lists(rewards, min_size=1, max_size=4), st.sampled_from(["group", "none"]))
def test_a_group_alone_is_what_it_is_among_others(groups: list[list[float | None]], scale: Scale):
    assert advantages_of_groups(groups, scale) == tuple(advantages_of_groups([group], scale)[0] for group in groups)
