"""Rewards of a group to advantages: how much better each sibling did than its group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from art_patch.records import Trajectory

TOLERANCE = 1e-6
"""A spread below this is rounding, not signal: three rewards of 0.1 have a standard deviation of 1e-17."""

_EPSILON = 1e-4  # as in TRL: keeps a small spread from becoming a huge advantage


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory with its advantage within its group."""

    trajectory: Trajectory
    advantage: float


def advantages_G(rewards_G: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return `(reward - mean) / (std + 1e-4)` for each of the G siblings; 0 for an unscored one.

    The standard deviation has ddof=1 (DeepSeekMath, https://arxiv.org/abs/2402.03300, as TRL computes it).
    `None` means that the group teaches nothing: fewer than two scored siblings, or all of them scored alike.
    """
    scored = [reward for reward in rewards_G if reward is not None and math.isfinite(reward)]
    if len(scored) < 2:
        return None
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    if std < TOLERANCE:
        return None
    return tuple(
        0.0 if reward is None or not math.isfinite(reward) else (reward - mean) / (std + _EPSILON)
        for reward in rewards_G
    )
