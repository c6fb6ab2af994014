"""The class `Environment`, which a script extends, and the pool in which several environments play at the same time.

- **The seed is the scenario.** Episodes with the same seed are siblings and are compared with each other, so `reset`
  must begin each of them in the same state. After that, chance may differ between them.
- **Illegal actions.** If an answer is not a legal action, `parse_action` raises a `ValueError`, or `step` raises an
  `IllegalAction` before it changes anything. The agent gets the error message and is asked again, up to `attempts`
  times in all. After the last attempt the episode ends, and `illegal_reward` is added to its reward.
- **Any other exception is a failure.** It is kept in the group's `exceptions`, and the episode is not trained on. The
  environment is closed and not used again, because its state is unknown.
- **Plain or async.** `reset`, `step` and `close` may be coroutine functions. Plain methods of one environment all run
  in one thread of its own, so they may be slow, and may hold objects that are bound to one thread.

An environment plays one episode at a time, and is then reused for the next.
"""

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from art_patch.errors import ConfigError

_log = logging.getLogger(__name__)

T = TypeVar("T")
StateT = TypeVar("StateT")
ActionT = TypeVar("ActionT")

Step = tuple[StateT, float, bool, Mapping[str, Any]]
"""State, reward, done, info."""


class IllegalAction(ValueError):
    """An answer names no action, or an action that is not possible now; the error message is sent to the agent."""


class Environment(Generic[StateT, ActionT]):
    """A game or simulator in which an agent acts; a script extends this class.

    Attributes:
        instructions: the rules of the game, sent as the system message of each conversation; empty for no such message.
        attempts: how often the agent may answer in one state until an answer is a legal action.
        illegal_reward: added to the episode's reward if no attempt was legal, which ends the episode.
    """

    instructions: str = ""
    # Class attributes, so that a script's class can set them without a constructor.
    attempts: int = 1
    illegal_reward: float = -1.0

    def reset(self, seed: int) -> StateT | Awaitable[StateT]:
        """Start an episode and return its first state, which must be the same whenever the seed is the same."""
        raise NotImplementedError(f"{type(self).__name__} has no reset(seed)")

    def step(self, action: ActionT) -> Step[StateT] | Awaitable[Step[StateT]]:
        """Play an action; return the next state, the reward of this step, whether the episode is done, and the info.

        Numbers in `info["metrics"]` become metrics of the trajectory; if two steps set the same metric, the later value
        counts. Raise an `IllegalAction`, before anything changes, if the action is not possible in this state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step(action)")

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the environment; no other method is called after this one."""
        return None

    def describe(self, state: StateT) -> str:
        """Return the text that the agent is sent for a state; unless overridden, `str(state)`."""
        return str(state)

    def parse_action(self, answer: str, state: StateT) -> ActionT:
        """Return the action that the answer means; a `ValueError`, which the agent is told, if none."""
        found: Any = answer.strip()
        return found


Make = Callable[[], Environment[Any, Any]]


class OwnThread:
    """A thread that runs one call at a time, so that the event loop is not blocked; the first call starts it."""

    def __init__(self) -> None:
        # One thread for all calls: an environment may hold objects of one thread, such as a connection to SQLite.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="art-patch-environment")

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call the function in the thread and return its result; if the caller is cancelled, the call runs on."""
        # `run_in_executor` does not carry context variables over, as `asyncio.to_thread` does.
        call = partial(copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Let the thread finish its queued calls, then call `last` and end; does not wait for any of that."""
        if last is not None:
            self._executor.submit(last)
        self._executor.shutdown(wait=False)


class Worker:
    """One environment and the thread in which it runs; the thread creates the environment when it is first needed."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._thread = OwnThread()
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


@contextmanager
def _logged(environment: Environment[Any, Any]) -> Generator[None]:
    try:
        yield
    except Exception:  # the script's own code; the episode's result, or its error, must not be lost for it
        _log.warning("%s did not close", type(environment).__name__, exc_info=True)
