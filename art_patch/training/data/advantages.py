"""Rewards of groups to advantages: how much better each sibling did than its group.

`(reward - mean of its group) / (spread + 1e-4)`, where the spread is that of the group (DeepSeekMath,
https://arxiv.org/abs/2402.03300), of all rewards of the batch (https://arxiv.org/abs/2508.08221), or not divided by at
all (Dr. GRPO, https://arxiv.org/abs/2503.20783: a division by the group's makes very easy and very hard scenarios
count more). Standard deviations have ddof=1, as TRL computes them.

A sibling without a finite reward was not scored: its advantage is 0, and nobody else's changes. The caller gives `None`
for a sibling that is not trained, so that the advantages of those that are sum to 0. A group with fewer than two scored
siblings, or all of them scored alike, teaches nothing: it is `None`, to be skipped rather than forwarded with zeros.
TRL forwards it and counts its tokens in the loss's mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeGuard

Scale = Literal["group", "batch", "none"]

TOLERANCE = 1e-6
"""A spread below this is rounding, not signal: three rewards of 0.1 have a standard deviation of 1e-17."""

_EPSILON = 1e-4  # as in TRL: keeps a small spread from becoming a huge advantage


def advantages_of_groups(
    groups: Sequence[Sequence[float | None]], scale: Scale = "group"
) -> tuple[tuple[float, ...] | None, ...]:
    """Return the advantages of every sibling of every group; `None` in place of a group that teaches nothing.

    Args:
        groups: the rewards of each group; `None` or not finite for a sibling that was not scored or is not trained.
        scale: what the distance from the group's mean is divided by. "batch" takes the spread of every reward given,
            those of groups that teach nothing included.
    """
    scored = [[reward for reward in group if _is_scored(reward)] for group in groups]
    of_batch = _spread([reward for rewards in scored for reward in rewards])
    return tuple(
        _advantages(group, rewards, {"group": _spread(rewards), "batch": of_batch, "none": None}[scale])
        for group, rewards in zip(groups, scored, strict=True)
    )


def _advantages(
    group: Sequence[float | None], scored: Sequence[float], spread: float | None
) -> tuple[float, ...] | None:
    if _spread(scored) < TOLERANCE:
        return None
    mean = math.fsum(scored) / len(scored)
    divisor = 1.0 if spread is None else spread + _EPSILON
    return tuple((reward - mean) / divisor if _is_scored(reward) else 0.0 for reward in group)


def _is_scored(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)


def _spread(rewards: Sequence[float]) -> float:
    """Standard deviation with ddof=1; 0 of fewer than two."""
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
