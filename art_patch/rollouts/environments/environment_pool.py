"""Environments at work: some at once, each in a thread of its own, used again for the next episode.

One whose episode raised is closed and never used again: nobody knows what state it is in.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from art_patch.errors import ConfigError
from art_patch.rollouts.environments.environment import Environment
from art_patch.rollouts.environments.own_thread import OwnThread

_log = logging.getLogger(__name__)

Make = Callable[[], Environment[Any, Any]]


class Worker:
    """One environment and its thread."""

    def __init__(self, make: Make) -> None:
        """Make nothing yet.

        Args:
            make: makes the environment, in the thread.
        """
        self._make = make
        self._thread = OwnThread()
        self._environment: Environment[Any, Any] | None = None

    async def environment(self) -> Environment[Any, Any]:
        """Return the environment, which is made first if there is none."""
        if self._environment is None:
            self._environment = await self._thread.run(self._make)
        return self._environment

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment: a coroutine function here, everything else in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self._thread.run(function, *args)

    async def close(self) -> None:
        """Close the environment. A plain one closes in its thread when that comes to it; nobody waits."""
        environment, self._environment = self._environment, None
        if environment is None:
            self._thread.end()
        elif inspect.iscoroutinefunction(environment.close):
            self._thread.end()
            try:
                await environment.close()
            except Exception:
                _log_unclosed(environment)
        else:
            self._thread.end(lambda: _close(environment))


class EnvironmentPool:
    """See the module."""

    def __init__(self, make: Make, most: int) -> None:
        """Make none yet.

        Args:
            make: makes an environment.
            most: how many may work at once.
        """
        self._make = make
        self._gate = asyncio.Semaphore(most)
        self._free: list[Worker] = []

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[Worker]:
        """Give an environment for one episode, when one may begin."""
        async with self._gate:
            worker = self._free.pop() if self._free else Worker(self._make)
            try:
                yield worker
            except BaseException:
                await worker.close()
                raise
            self._free.append(worker)

    async def close(self) -> None:
        """Close all that are free."""
        while self._free:
            await self._free.pop().close()


def maker_of(environment: Environment[Any, Any] | Make) -> Make:
    """Return what makes environments: what is given, or what copies the one that is given.

    Raises:
        ConfigError: it is neither, or cannot be copied.
    """
    if not isinstance(environment, Environment):
        if not callable(environment):
            raise ConfigError(f"environment={environment!r} is no Environment; give one, or a function that makes one")
        return environment
    original: Environment[Any, Any] = environment
    try:
        copy.deepcopy(original)
    except Exception as error:  # of the script's own __deepcopy__, or of what cannot be copied: locks, files
        raise ConfigError(
            f"{type(original).__name__} cannot be copied for episodes that run at once ({error}); "
            "give its class, or a function without arguments that makes one"
        ) from error
    return lambda: copy.deepcopy(original)


def _close(environment: Environment[Any, Any]) -> None:
    try:
        environment.close()
    except Exception:
        _log_unclosed(environment)


def _log_unclosed(environment: Environment[Any, Any]) -> None:
    _log.warning("%s did not close", type(environment).__name__, exc_info=True)
