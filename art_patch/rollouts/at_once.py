"""Rollouts at once, counted by the gathering around them.

A rollout that raises does not end the others: its exception is counted, and kept with the trajectory as far as it had
come, up to `max_exceptions` (a number of rollouts, or below 1 a share of them). One more ends the gathering: its
exception is raised, and the rollouts that still run are cancelled and waited for, so that none goes on unseen.
Cancelling the gathering does the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel

from art_patch.errors import ConfigError
from art_patch.rollouts.progress import Bar, bar
from art_patch.rollouts.trajectory import MADE_HERE, Trajectory, remember
from art_patch.trajectories import sampled_tokens


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
        """Count a trajectory's metrics."""
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


async def run_all(rollouts: Sequence[Any]) -> list[Any]:
    """Run what is awaitable at once, each in a task of its own, and count it in the gathering around, if there is one.

    Returns:
        What each gave, in order; the exception of one that raised. What is not awaitable stands for itself.
    """
    around = _here.get()

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
            if around is not None:
                around.failed(error)
                around.advance(1)
            elif not isinstance(error, Exception):
                raise
            return error
        if around is not None:
            whole = [found] if isinstance(found, Trajectory) else list(found)
            for trajectory in whole:
                around.took(trajectory)
            around.advance(1)
            return found if isinstance(found, BaseModel) else whole  # a trajectory, or a group of them
        return found

    return await at_once([one(rollout) for rollout in rollouts])


async def at_once(coroutines: Sequence[Any]) -> list[Any]:
    """Like `asyncio.gather`, but when one raises, or we are cancelled, the others are ended before it is told."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def gathering(description: str | None, total: int, max_exceptions: float, max_metrics: int | None) -> Generator[None]:
    """Count the rollouts that `run_all` runs in here, with a bar on stderr."""
    if not max_exceptions >= 0:
        raise ConfigError(f"max_exceptions={max_exceptions} must be 0 or more, or a share below 1")
    with bar(description, total) as shown:
        token = _here.set(_Gathering(shown, total, max_exceptions, max_metrics))
        try:
            yield
        finally:
            _here.reset(token)
