"""Runs many rollouts at the same time, each in its own task, counts their results and shows a bar on stderr.

A rollout that raises does not end the others. Its exception is counted and carries the newest trajectory that the
rollout had made. If more than `max_exceptions` raise, the last exception is raised to the caller. In that case, and if
the caller is cancelled, the rollouts that still run are cancelled and their end is awaited.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from pydantic import BaseModel

from art_patch.errors import ConfigError
from art_patch.rollouts.trajectory import MADE_HERE, Trajectory, remember
from art_patch.trajectories import sampled_tokens

# While bars are shown, a list of the display and the number of its bars: rich allows one live display in a process.
_display: list[Any] = []


@contextmanager
def bar(description: str | None, total: int) -> Generator[Callable[..., object]]:
    """Show a progress bar on stderr, unless `description` is `None`, and yield the function that updates it."""
    if description is None or (display := _begin_bar()) is None:
        yield _show_nothing
        return
    task = display.add_task(description, total=total, note="")
    try:
        yield partial(display.update, task)
    finally:
        # The finished bar stays as it is until the last one ends, with its clock stopped.
        display.stop_task(task)
        _display[0][1] -= 1
        if not _display[0][1]:
            _display.clear()
            display.stop()


def _show_nothing(**_: object) -> None: ...


def _begin_bar() -> Any:
    if not _display:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        # Only where a person looks on: in the log of a job, progress would be thousands of lines.
        if not (console.is_terminal or console.is_jupyter):
            return None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        display = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        display.start()
        _display.append([display, 0])
    _display[0][1] += 1
    return _display[0][0]


class _Gathering:
    """The rollouts of one gathering, counted."""

    def __init__(self, show: Callable[..., object], allowed: float, max_metrics: int | None) -> None:
        self._show, self._allowed, self._max_metrics = show, allowed, max_metrics
        self._exceptions = 0
        self._sums: dict[str, float] = {}
        self._counts: Counter[str] = Counter()

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the trajectories of one rollout."""
        for trajectory in trajectories:
            tokens = [sampled_tokens(choice) for choice in trajectory.choices()]
            known = [count for count in tokens if count is not None]
            if known and len(known) == len(tokens):  # a sum over some of its choices would look like a short rollout
                trajectory.metrics["completion_tokens"] = sum(known)
            for name, value in {"reward": trajectory.reward, **trajectory.metrics}.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
                self._counts[name] += 1
        self._advance()

    def failed(self, error: BaseException) -> None:
        """Count an exception; raise it if too many have raised, or if it ends the program (`KeyboardInterrupt`)."""
        self._exceptions += 1
        if not isinstance(error, Exception) or self._exceptions > self._allowed:
            raise error
        self._advance()

    def _advance(self) -> None:
        shown = [(name, total / self._counts[name]) for name, total in self._sums.items()][: self._max_metrics]
        if self._exceptions:
            shown.append(("exceptions", float(self._exceptions)))
        self._show(advance=1, note=" ".join(f"{name}={value:.3g}" for name, value in shown))


_here: ContextVar[_Gathering | None] = ContextVar("art_patch_gathering", default=None)


@contextmanager
def gathering(description: str | None, total: int, max_exceptions: float, max_metrics: int | None) -> Generator[None]:
    """Count the `total` rollouts that `run_all` runs inside the block, and show number and mean metrics in a bar.

    The other arguments are those of `gather_trajectory_groups`.
    """
    if not max_exceptions >= 0:  # written so that NaN is refused, too
        raise ConfigError(f"max_exceptions={max_exceptions} must be 0 or more, or a share below 1")
    allowed = max_exceptions * total if max_exceptions < 1 else max_exceptions
    with bar(description, total) as shown:
        token = _here.set(_Gathering(shown, allowed, max_metrics))
        try:
            yield
        finally:
            _here.reset(token)


async def run_all(rollouts: Sequence[Any]) -> list[Any]:
    """Run awaitable rollouts at the same time; return results, exceptions, and what is not awaitable, in order.

    If a `gathering` block encloses the call, it counts the results and raises if too many rollouts raise.
    """
    around = _here.get()

    async def one(rollout: Any) -> Any:
        if not isinstance(rollout, Awaitable):
            return rollout
        made: list[Trajectory] = []
        MADE_HERE.set(made)  # visible in this task only, because each task has its own copy of the context
        try:
            found: Any = await rollout
        except asyncio.CancelledError:  # the gathering was cancelled; the rollout did not fail
            raise
        except BaseException as error:
            remember(error, made[-1] if made else None)
            if around is not None:
                around.failed(error)
            elif not isinstance(error, Exception):
                raise
            return error
        if around is None:
            return found
        whole = [found] if isinstance(found, Trajectory) else list(found)
        around.add(whole)
        return found if isinstance(found, BaseModel) else whole  # a trajectory or a group; else a list of them

    return await at_once([one(rollout) for rollout in rollouts])


async def at_once(coroutines: Sequence[Any]) -> list[Any]:
    """Run coroutines like `asyncio.gather`; if one raises or the call is cancelled, cancel the others and wait."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # Cancelling a task that is done does nothing.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
