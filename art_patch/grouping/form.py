"""Forming groups of siblings from trajectories."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from art_patch.grouping.scenario import is_held_out, scenario_of
from art_patch.records import Group, Trajectory


@dataclass(frozen=True, slots=True)
class Grouping:
    """What became of the trajectories.

    Attributes:
        groups: in order of each group's oldest member.
        left: why the others were not grouped, with how many.
    """

    groups: tuple[Group, ...]
    left: Mapping[str, int]


def form_groups(
    trajectories: Sequence[Trajectory],
    *,
    new_id: Callable[[], str],
    min_size: int = 2,
    max_size: int = 16,
    holdout_share: float = 0.2,
) -> Grouping:
    """Group siblings.

    Args:
        trajectories: settled ones that no group holds yet, oldest first.
        new_id: makes group ids.
        min_size: fewer siblings than this wait for more.
        max_size: more siblings than this are split evenly, because a judge ranks few better than many.
        holdout_share: part of the scenarios that is kept for the gate.
    """
    left: Counter[str] = Counter()
    found: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        scenario = scenario_of(trajectory)
        if scenario is None:
            left["no calls"] += 1
        elif (reason := _why_not(trajectory)) is not None:
            left[reason] += 1
        else:
            found[scenario].append(trajectory)
    groups: list[Group] = []
    for (key, how), siblings in found.items():
        if len(siblings) < min_size:
            left["waits for a sibling"] += len(siblings)
            continue
        held_out = is_held_out(key, holdout_share)
        for part in _split(siblings, max_size):
            groups.append(Group(new_id(), key, how, tuple(part), held_out))
    return Grouping(tuple(groups), dict(left))


def _why_not(trajectory: Trajectory) -> str | None:
    """A trajectory that has nothing to train on is not worth the judge's money."""
    if any(call.untrainable is None for call in trajectory.calls):
        return None
    reasons = Counter(call.untrainable for call in trajectory.calls)
    return reasons.most_common(1)[0][0]


def _split(siblings: list[Trajectory], max_size: int) -> list[list[Trajectory]]:
    parts = -(-len(siblings) // max_size)
    size, extra = divmod(len(siblings), parts)
    cuts = [i * size + min(i, extra) for i in range(parts + 1)]
    return [siblings[a:b] for a, b in pairwise(cuts)]
