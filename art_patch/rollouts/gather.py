"""`gather_trajectories` and `gather_trajectory_groups`: rollouts, many at once -> trajectories and groups."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, overload

from art_patch.rollouts.at_once import at_once, gathering, run_all
from art_patch.rollouts.trajectory import Trajectory
from art_patch.rollouts.trajectory_group import PendingGroup, TrajectoryGroup

AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = ...,
    max_exceptions: float = ...,
) -> list[Trajectory | BaseException]: ...


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = ...,
    max_exceptions: float = ...,
) -> list[list[Trajectory] | BaseException]: ...


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]] | Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
) -> Sequence[Trajectory | list[Trajectory] | BaseException]:
    """Run rollouts at once and return what they give, in their order; an exception stands for one that raised.

    Args:
        trajectories: coroutines, each of a trajectory or of several.
        pbar_desc: of the progress bar; `None` shows none.
        max_exceptions: how many may raise; below 1, which share of them. One more is raised.

    Raises:
        ConfigError: `max_exceptions` is below 0.
    """
    rollouts: list[Awaitable[Any]] = list(trajectories)
    with gathering(pbar_desc, len(rollouts), max_exceptions, None):
        found = await run_all(rollouts)
    return [each if isinstance(each, Trajectory | BaseException) else list(each) for each in found]


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Run the rollouts of all groups at once and return the groups, in their order.

    Args:
        groups: `TrajectoryGroup(rollout(...) for ...)`, or coroutines of groups.
        pbar_desc: of the progress bar; `None` shows none.
        max_exceptions: how many rollouts may raise; below 1, which share of them. One more is raised.
        max_metrics: how many metrics stand beside the bar; all unless given.
        after_each: called with each group as soon as it is there, to judge it for example; what it returns takes the
            group's place: a group, several, or `None` for none.

    Raises:
        ConfigError: `max_exceptions` is below 0.
    """
    waiting = list(groups)
    total = sum(len(each) if isinstance(each, PendingGroup) else 1 for each in waiting)

    async def one(group: Awaitable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        if isinstance(group, PendingGroup):
            there = await group
        else:
            (only,) = await run_all([group])
            if isinstance(only, BaseException):
                return []
            there = only
        after = there if after_each is None else await after_each(there)
        return [] if after is None else after if isinstance(after, list) else [after]

    with gathering(pbar_desc, total, max_exceptions, max_metrics):
        found = await at_once([one(group) for group in waiting])
    return [group for of_one in found for group in of_one]
