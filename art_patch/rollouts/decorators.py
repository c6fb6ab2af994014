"""Decorators for rollouts: `retry` and `limit_concurrency`. This module imports only the standard library."""

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from art_patch.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger(__name__)


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
