"""Runs many rollouts at the same time, each in its own task, counts their results and shows a bar on stderr.

A rollout that raises does not end the others. Its exception is counted and carries the newest trajectory that the
rollout had made. If more than `max_exceptions` raise, the last exception is raised to the caller. In that case, and if
the caller is cancelled, the rollouts that still run are cancelled and their end is awaited.
"""

import asyncio
import functools
import inspect
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

from pydantic import BaseModel

from art_patch.errors import ConfigError
from art_patch.rollouts.trajectory import MADE_HERE, Trajectory, remember
from art_patch.trajectories import sampled_tokens

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)

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
        yield functools.partial(display.update, task)
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
    """Count the `total` rollouts that `run_all` runs inside, in a bar; arguments as in `gather_trajectory_groups`."""
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
    """Run rollouts, counted by a `gathering` block; return results, exceptions and what is not awaitable, in order."""
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


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[Exception], ...] = (Exception,),
    on_retry: Callable[[Exception, int], None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Call the decorated function again if it raises; if the last permitted call raises, raise its exception.

    Args:
        max_attempts: largest number of calls, the first one included.
        delay: seconds before the second call.
        backoff_factor: factor by which each further wait is longer than the one before.
        exceptions: exception classes after which the function is called again; any other exception is raised at once.
        on_retry: called with the exception and the number of the call that raised it. Without it a warning is logged.
    """
    if max_attempts < 1:
        raise ConfigError(f"max_attempts={max_attempts} must be at least 1, which calls once and never again")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        def wait_after(error: Exception, attempt: int) -> float:
            if on_retry is not None:
                on_retry(error, attempt)
            else:
                name = getattr(function, "__name__", repr(function))
                _log.warning("%s failed, call %d of %d: %s", name, attempt, max_attempts, error)
            return delay * backoff_factor ** (attempt - 1)

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            for attempt in range(1, max_attempts):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    time.sleep(wait_after(error, attempt))
            return function(*args, **kwargs)  # outside of the loop, so that its exception is the caller's

        @functools.wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            for attempt in range(1, max_attempts):
                try:
                    return await cast("Awaitable[Any]", function(*args, **kwargs))
                except exceptions as error:
                    await asyncio.sleep(wait_after(error, attempt))
            return await cast("Awaitable[Any]", function(*args, **kwargs))

        return cast("Callable[P, R]", awaited) if inspect.iscoroutinefunction(function) else called

    return decorate


class Gates:
    """One semaphore for each key in use; each semaphore lets `n` callers through at the same time."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._open: dict[tuple[int, str], tuple[asyncio.Semaphore, int]] = {}

    @contextmanager
    def at(self, key: str) -> Generator[asyncio.Semaphore]:
        """Yield the semaphore of `key`, and delete it when no caller uses it or waits for it."""
        # A semaphore belongs to the event loop that waits at it, and a script may run several loops in turn.
        place = (id(asyncio.get_running_loop()), key)
        # `users` counts those that wait or run, so that the semaphore goes with the last of them.
        gate, users = self._open.get(place) or (asyncio.Semaphore(self._n), 0)
        self._open[place] = gate, users + 1
        try:
            yield gate
        finally:
            _, users = self._open.pop(place)
            if users > 1:  # else one would stay for every scenario there ever was
                self._open[place] = gate, users - 1


def limit_concurrency(
    n: int, derive_key: Callable[..., str] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Let at most `n` calls of the decorated coroutine function run at the same time; further calls wait.

    Args:
        n: largest number of calls that run at the same time; with `derive_key`, for each key.
        derive_key: returns a key for a call's arguments; only calls with the same key wait for each other.
    """
    if n < 1:
        raise ConfigError(f"n={n} must be at least 1, or nothing would ever run")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        gates = Gates(n)

        @functools.wraps(function)
        async def called(*args: P.args, **kwargs: P.kwargs) -> R:
            with gates.at("" if derive_key is None else derive_key(*args, **kwargs)) as gate:
                async with gate:
                    return await function(*args, **kwargs)

        return called

    return decorate
