from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from art_patch.rewards import rewards_G
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
