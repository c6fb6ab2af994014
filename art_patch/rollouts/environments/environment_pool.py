"""Environments at work: several at once, each in a thread of its own, used again for the next episode.

An environment whose episode raised is closed and not used again, because its state is unknown.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from art_patch.errors import ConfigError
from art_patch.rollouts.environments.environment import Environment

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

Make = Callable[[], Environment[Any, Any]]


class OwnThread:
    """A thread that runs one call at a time while the event loop goes on; it begins with the first call.

    An environment may hold objects that only the thread that made them may use: a connection to SQLite, a window.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="art-patch-environment")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in the thread and return its result; cancelling does not wait for it."""
        # `run_in_executor` does not carry context variables over, as `asyncio.to_thread` does.
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: context.run(function, *args, **kwargs)
        )

    def end(self, last: Callable[[], None] | None = None) -> None:
        """Call `last` after all other calls, and end; waits for nothing."""
        if last is not None:
            self._executor.submit(last)
        self._executor.shutdown(wait=False)


class Worker:
    """One environment and its thread."""

    def __init__(self, make: Make) -> None:
        """Make nothing yet; `make` is called in the thread."""
        self._make = make
        self._thread = OwnThread()
        self._environment: Environment[Any, Any] | None = None

    async def environment(self) -> Environment[Any, Any]:
        """Return the environment; the first call makes it."""
        if self._environment is None:
            self._environment = await self._thread.run(self._make)
        return self._environment

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment: a coroutine function on the event loop, any other in the thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self._thread.run(function, *args)

    async def close(self) -> None:
        """Close the environment. A `close` that is no coroutine function runs in the thread later, not waited for."""
        environment, self._environment = self._environment, None
        if environment is None:
            self._thread.end()
        elif inspect.iscoroutinefunction(environment.close):
            self._thread.end()
            try:
                await environment.close()
            except Exception:  # the script's own code; the episode's result, or its error, must not be lost for it
                _log_unclosed(environment)
        else:
            # Behind a call that may still run: a cancelled episode leaves its thread in the middle of `step`.
            self._thread.end(lambda: _close(environment))


class EnvironmentPool:
    """At most so many environments at once; each is made when it is first needed."""

    def __init__(self, make: Make, most: int) -> None:
        """Let at most `most` environments work at once."""
        self._make = make
        self._gate = asyncio.Semaphore(most)
        self._free: list[Worker] = []

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[Worker]:
        """Wait for a free place and give an environment for one episode."""
        async with self._gate:
            worker = self._free.pop() if self._free else Worker(self._make)
            try:
                yield worker
            except BaseException:
                await worker.close()
                raise
            # Only here, after an episode without an error; `reset` begins the next one from any state.
            self._free.append(worker)

    async def close(self) -> None:
        """Close all environments that are free."""
        while self._free:
            await self._free.pop().close()


def maker_of(environment: Environment[Any, Any] | Make) -> Make:
    """Return a function that makes environments: the given one, or one that copies the given environment.

    Raises:
        ConfigError: it is neither an environment nor callable, or the environment cannot be copied.
    """
    if not isinstance(environment, Environment):
        if not callable(environment):
            raise ConfigError(f"environment={environment!r} is no Environment; give one, or a function that makes one")
        return environment
    original: Environment[Any, Any] = environment
    try:
        # Tried once here, so that the script hears of it before the first episode.
        copy.deepcopy(original)
    except Exception as error:  # of the script's own __deepcopy__, or of locks and files, which have no copies
        raise ConfigError(
            f"{type(original).__name__} cannot be copied for episodes that run at once ({error}); "
            "give its class, or a function without arguments that makes one"
        ) from error
    return lambda: copy.deepcopy(original)


def _close(environment: Environment[Any, Any]) -> None:
    try:
        environment.close()
    except Exception:  # as above
        _log_unclosed(environment)


def _log_unclosed(environment: Environment[Any, Any]) -> None:
    _log.warning("%s did not close", type(environment).__name__, exc_info=True)
