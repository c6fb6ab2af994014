from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from art_patch.rewards import Combination, load_combination, reward_noise, rewards_G, with_scores
from art_patch.types import Group, Score


def score(
    sibling: int, value: float, *, name: str = "ruler", source: str = "ruler", at: float = 1.0, group: str | None = "g0"
) -> Score:
    trajectory = f"g0-{sibling}"
    return Score(f"{trajectory}{name}{source}{at}", trajectory, name, value, source, at, group_id=group)


def test_a_reward_given_by_user_or_code_counts_before_ruler(groups_of: Callable[..., list[Group]]) -> None:
    (group,) = groups_of(1, siblings=4)
    scores = [
        *(score(i, 0.5) for i in range(3)),
        score(0, 0.0, name="reward", source="user", group=None),
        score(1, 1.0, name="reward", source="code", group=None),
        score(2, 0.1, name="thumbs", source="user", group=None),
    ]
    assert rewards_G(group, scores) == (0.0, 1.0, 0.5, None)
    assert rewards_G(group, reversed(scores)) == (0.0, 1.0, 0.5, None)


def test_the_newest_of_a_kind_counts(groups_of: Callable[..., list[Group]]) -> None:
    (group,) = groups_of(1, siblings=2)
    scores = [score(0, 0.9, at=2), score(0, 0.1, at=1), score(1, 0.3, at=5), score(1, 0.4, at=5)]
    assert rewards_G(group, scores) == (0.9, 0.4)


def test_ruler_of_another_group_and_numbers_that_are_none_do_not_count(groups_of: Callable[..., list[Group]]) -> None:
    (group,) = groups_of(1, siblings=2)
    scores = [score(0, 0.9, group="other"), score(1, math.nan), score(1, math.inf, name="reward", source="user")]
    assert rewards_G(group, scores) == (None, None)


def test_scores_stored_with_the_trajectories_count(groups_of: Callable[..., list[Group]]) -> None:
    (group,) = groups_of(1, siblings=2)
    first, second = group.trajectories
    stored = replace(group, trajectories=(replace(first, scores=(score(0, 0.7),)), second))
    assert rewards_G(stored) == (0.7, None)
    assert rewards_G(stored, [score(1, 0.2)]) == (0.7, 0.2)


def test_only_what_the_judge_said_is_noisy(groups_of: Callable[..., list[Group]]) -> None:
    (group,) = groups_of(1, siblings=2)
    noise = {("j", "r"): 0.04}
    judged = [replace(score(i, value), judge="j", rubric="r") for i, value in enumerate((0.0, 1.0))]
    given = [score(i, 0.5, name="reward", source="user", group=None) for i in range(2)]
    assert reward_noise(with_scores(group, judged), noise) == pytest.approx(0.04)
    assert reward_noise(with_scores(group, [*judged, *given]), noise) == 0.0
    assert reward_noise(with_scores(group, judged), {("another", "r"): 0.04}) == 0.0
    assert reward_noise(with_scores(group, judged), {}) == 0.0
    # of one sibling alone: the root mean square over both
    assert reward_noise(with_scores(group, [*judged, given[0]]), noise) == pytest.approx(0.04 / 2**0.5)
    half = load_combination("criteria", criteria="accuracy=1,completeness=1,efficiency=0,satisfaction=0")
    assert reward_noise(with_scores(group, judged), noise, combination=half) == pytest.approx(0.02)
    constant = Combination("m:f", lambda group: (0.5,) * len(group.trajectories))
    assert reward_noise(with_scores(group, judged), noise, combination=constant) == 0.0
