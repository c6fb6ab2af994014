"""Rollouts, many at once -> trajectories and groups.

A rollout that raises costs nobody else theirs: its exception is counted, and kept with the trajectory as far as it had
come, up to `max_exceptions` (a number of rollouts, or below 1 a share of them). One more ends the gathering: its
exception is raised, and the rollouts that still run are cancelled and waited for, so that nothing goes on unseen.
Cancelling the gathering does the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, overload

from art_patch.errors import ConfigError
from art_patch.exact import sampled_tokens
from art_patch.explicit.progress import Bar, bar
from art_patch.explicit.trajectory import MADE_HERE, Trajectory
from art_patch.explicit.trajectory_group import PendingGroup, TrajectoryGroup, remember

T = TypeVar("T")

AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


class _Gathering:
    """What one gathering has come to so far."""

    def __init__(self, bar: Bar, total: int, max_exceptions: float, max_metrics: int | None) -> None:
        self._bar = bar
        self._total = total
        self._max_exceptions = max_exceptions
        self._max_metrics = max_metrics
        self._exceptions = 0
        self._sums: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def took(self, trajectory: Trajectory) -> None:
        """Count a trajectory's figures."""
        tokens = [sampled_tokens(choice) for choice in trajectory.choices()]
        known = [count for count in tokens if count is not None]
        if known and len(known) == len(tokens):
            trajectory.metrics["completion_tokens"] = sum(known)
        for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] += 1

    def failed(self, error: BaseException) -> None:
        """Count an exception; raise it if it is one too many, or a request to end."""
        self._exceptions += 1
        share = 0 < self._max_exceptions < 1
        allowed = self._max_exceptions * self._total if share else self._max_exceptions
        if not isinstance(error, Exception) or self._exceptions > allowed:
            raise error

    def advance(self, by: int) -> None:
        """Show it."""
        means = {name: self._sums[name] / self._counts[name] for name in self._sums}
        shown = list(means.items())[: self._max_metrics]
        if self._exceptions:
            shown.append(("exceptions", self._exceptions))
        self._bar.advance(by, " ".join(f"{name}={value:.3g}" for name, value in shown))


_here: ContextVar[_Gathering | None] = ContextVar("art_patch_gathering", default=None)


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
    with _gathering(pbar_desc, len(rollouts), max_exceptions, None):
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
        max_metrics: how many figures stand beside the bar; all unless given.
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

    with _gathering(pbar_desc, total, max_exceptions, max_metrics):
        found = await _at_once([one(group) for group in waiting])
    return [group for of_one in found for group in of_one]


async def run_all(rollouts: Sequence[Any]) -> list[Any]:
    """Run what is awaitable at once, each in a task of its own, and count it in the gathering around, if there is one.

    Returns:
        What each gave, in order; the exception of one that raised. What is not awaitable stands for itself.
    """
    gathering = _here.get()

    async def one(rollout: Any) -> Any:
        if not isinstance(rollout, Awaitable):
            return rollout
        made: list[Trajectory] = []
        MADE_HERE.set(made)  # of this task alone
        try:
            found: Any = await rollout
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise
            remember(error, made[-1] if made else None)
            if gathering is not None:
                gathering.failed(error)
                gathering.advance(1)
            elif not isinstance(error, Exception):
                raise
            return error
        if gathering is not None:
            whole = [found] if isinstance(found, Trajectory) else list(found)
            for trajectory in whole:
                gathering.took(trajectory)
            gathering.advance(1)
            return found if isinstance(found, Trajectory | TrajectoryGroup) else whole
        return found

    return await _at_once([one(rollout) for rollout in rollouts])


async def _at_once(coroutines: Sequence[Any]) -> list[Any]:
    """Like `asyncio.gather`, but when one raises, or we are cancelled, the others are ended before it is told."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _gathering(description: str | None, total: int, max_exceptions: float, max_metrics: int | None) -> Generator[None]:
    if not max_exceptions >= 0:
        raise ConfigError(f"max_exceptions={max_exceptions} must be 0 or more, or a share below 1")
    with bar(description, total) as shown:
        token = _here.set(_Gathering(shown, total, max_exceptions, max_metrics))
        try:
            yield
        finally:
            _here.reset(token)
