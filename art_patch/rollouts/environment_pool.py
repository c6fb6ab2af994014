"""Environments that play at the same time: each in a thread of its own, reused for the next episode."""

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from art_patch.errors import ConfigError
from art_patch.rollouts import environments
from art_patch.rollouts.environments import Environment

_log = logging.getLogger(__name__)

Make = Callable[[], Environment[Any, Any]]


class Worker:
    """One environment and the thread in which it runs; the thread creates the environment when it is first needed."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._thread = environments.OwnThread()
        self._environment: Environment[Any, Any] | None = None

    async def environment(self) -> Environment[Any, Any]:
        """Return the environment; the first call creates it in the worker's thread."""
        if self._environment is None:
            self._environment = await self._thread.run(self._make)
        return self._environment

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the environment: coroutine functions on the event loop, others in the worker's thread."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self._thread.run(function, *args)

    async def close(self) -> None:
        """Close the environment, unawaited in its thread unless it is a coroutine function, and end the thread."""
        environment, self._environment = self._environment, None
        if environment is None:
            self._thread.end()
        elif inspect.iscoroutinefunction(environment.close):
            self._thread.end()
            with _logged(environment):
                await environment.close()
        else:
            # Behind a call that may still run: a cancelled episode leaves its thread in the middle of `step`.
            self._thread.end(_logged(environment)(environment.close))


class EnvironmentPool:
    """A pool of at most `most` environments that play at the same time; each is reused for the next episode."""

    def __init__(self, make: Make, most: int) -> None:
        self._make = make
        self._gate = asyncio.Semaphore(most)
        self._free: list[Worker] = []

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[Worker]:
        """Wait until fewer than `most` episodes run, and yield a worker; it is closed if the block raises."""
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
        """Close all environments that are not playing."""
        while self._free:
            await self._free.pop().close()


def maker_of(environment: Environment[Any, Any] | Make) -> Make:
    """Return a function that creates environments: `environment` itself, or one that makes deep copies of it."""
    if not isinstance(environment, Environment):
        if not callable(environment):
            raise ConfigError(f"environment={environment!r} is no Environment; give one, or a function that makes one")
        return environment
    copied = partial(copy.deepcopy, environment)
    try:
        copied()  # tried once here, so that the script hears of it before the first episode
    except Exception as error:  # of the script's own __deepcopy__, or of locks and files, which have no copies
        raise ConfigError(
            f"{type(environment).__name__} cannot be copied for episodes that run at once ({error}); "
            "give its class, or a function without arguments that makes one"
        ) from error
    return copied


def takes_seed(environment: Environment[Any, Any]) -> bool:
    """Whether `reset` takes a seed; without one, all episodes begin in one state, or in any."""
    return bool(inspect.signature(environment.reset).parameters)


@contextmanager
def _logged(environment: Environment[Any, Any]) -> Generator[None]:
    try:
        yield
    except Exception:  # the script's own code; the episode's result, or its error, must not be lost for it
        _log.warning("%s did not close", type(environment).__name__, exc_info=True)
