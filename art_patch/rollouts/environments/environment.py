"""`Environment`, the class that a script writes, and the pool in which several of them play at once.

- **The seed is the scenario.** Episodes of one seed are siblings and are compared with each other, so `reset` begins
  each of them in the same state. After that, chance may differ between them.
- **Illegal actions.** `parse_action` raises a `ValueError`, or `step` raises an `IllegalAction` before it changes
  anything. The agent is told why and asked again, `attempts` times in all. Then the episode ends, and `illegal_reward`
  is added to its reward.
- **Any other exception is a failure**: it is kept beside the group, and the episode is not learned from. The
  environment is closed and not used again, because its state is unknown.
- **Plain or async.** `reset`, `step` and `close` may be coroutine functions. Plain methods run in a thread of this
  environment's own, so they may be slow, and may keep objects that only their thread may use.

One object plays one episode at a time, and then the next.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, Generic, ParamSpec, TypeVar

from art_patch.errors import ConfigError

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
StateT = TypeVar("StateT")
ActionT = TypeVar("ActionT")

Step = tuple[StateT, float, bool, Mapping[str, Any]]
"""State, reward, done, info."""


class IllegalAction(ValueError):
    """An answer names no action, or an action that is not possible now. The agent reads the message."""


class Environment(Generic[StateT, ActionT]):
    """A game or simulator: the class that a script extends.

    Attributes:
        instructions: the rules, which begin each conversation as its system message; empty for none.
        attempts: how often the agent is asked for an action in one state.
        illegal_reward: added when none of the answers is legal, which ends the episode.
    """

    instructions: str = ""
    # Class attributes, so that a script's class can set them without a constructor.
    attempts: int = 1
    illegal_reward: float = -1.0

    def reset(self, seed: int) -> StateT | Awaitable[StateT]:
        """Begin an episode and return its first state; the same one for the same seed."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(seed)")

    def step(self, action: ActionT) -> Step[StateT] | Awaitable[Step[StateT]]:
        """Take an action; return the next state, the reward of this step, whether the episode is done, and the info.

        Numbers in `info["metrics"]` become metrics of the trajectory; a later step replaces an earlier one's. Raise an
        `IllegalAction`, before anything changes, if the action is not possible in this state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the environment; this is the last call."""
        return None

    def describe(self, state: StateT) -> str:
        """Return a state as text for the agent."""
        return str(state)

    def parse_action(self, answer: str, state: StateT) -> ActionT:
        """Return the action that an answer means, or raise a `ValueError` whose message the agent reads.

        Unless overridden, the action is the answer itself without spaces around it.
        """
        found: Any = answer.strip()
        return found


Make = Callable[[], Environment[Any, Any]]


class OwnThread:
    """A thread that runs one call at a time while the event loop goes on; it begins with the first call."""

    def __init__(self) -> None:
        # One thread for all calls, because an environment may hold objects that only the thread that made them may use:
        # a connection to SQLite, a window.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="art-patch-environment")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function in the thread and return its result; cancelling does not wait for it."""
        # `run_in_executor` does not carry context variables over, as `asyncio.to_thread` does.
        context = copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: context.run(function, *args, **kwargs)
        )

    def end(self, last: Callable[[], None] | None = None) -> None:
        """End the thread after all earlier calls and `last`, without waiting for them."""
        if last is not None:
            self._executor.submit(last)
        self._executor.shutdown(wait=False)


class Worker:
    """One environment and its thread, which makes the environment when it is first needed."""

    def __init__(self, make: Make) -> None:
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
    """At most `most` environments at work; each plays one episode after another."""

    def __init__(self, make: Make, most: int) -> None:
        self._make = make
        self._gate = asyncio.Semaphore(most)
        self._free: list[Worker] = []

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[Worker]:
        """Wait for a free place, and yield a worker for one episode."""
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
        """Close all environments that play no episode."""
        while self._free:
            await self._free.pop().close()


def maker_of(environment: Environment[Any, Any] | Make) -> Make:
    """Return a function that makes environments: the given one, or one that copies the given environment."""
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
