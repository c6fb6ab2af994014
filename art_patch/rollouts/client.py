"""The client of one model, a subclass of the OpenAI SDK's; `capture_auto_trajectory` records the calls made through it.

In a request the model's name stands for the policy that is champion at that moment; `NAME@STEP` names one fixed policy.
The client of a `TrainableModel` calls the engine's `/exact` routes, so each choice of an answer carries its exact
tokens. A streamed answer carries no tokens, so it cannot be trained on.

If the script also calls `patch()`, it does not record calls through this client: the script hands in its trajectories
itself, and a second recording would train on each of them twice.

Inside `capture_auto_trajectory`, a request whose messages extend a captured conversation continues it; of several, the
longest. A request that extends none, or that offers other tools, starts a new history of the trajectory. So branches,
sub-agents and shortened histories stay apart.
"""

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, overload

from openai import AsyncOpenAI, NotFoundError, Timeout
from openai._legacy_response import LegacyAPIResponse
from openai.types.chat.chat_completion import ChatCompletion, Choice

from art_patch import context, trajectories
from art_patch.errors import ConfigError
from art_patch.rollouts.at_once import Gates
from art_patch.rollouts.trajectory import History, Trajectory, remember
from art_patch.types import JSON

_MOST_AT_ONCE = 256  # requests in flight for one client; further ones wait here, without a socket or a timeout
_CHAT = "/chat/completions"
_ANSWER_S, _CONNECT_S = 1200.0, 60.0  # connecting takes long, too, when a crowd arrives at once

_YIELDED: ContextVar[list[Trajectory] | None] = ContextVar("art_patch_yielded", default=None)

# Open HTTP clients, each with a generator that closes it when its event loop shuts down generators.
_held: dict[Any, AsyncGenerator[None]] = {}


@dataclass(frozen=True, slots=True)
class Lane:
    """How a `ModelClient` reaches its model: the model's name, its current policy, and a limit on open requests."""

    name: str  # the model's name in requests
    policy: Callable[[], str]  # returns the name of the policy that the engine serves
    policy_changed: Callable[[], Awaitable[bool]]  # looks it up again; returns whether to ask again
    gates: Gates = field(default_factory=lambda: Gates(_MOST_AT_ONCE))


class ModelClient(AsyncOpenAI):
    """An `AsyncOpenAI` for one model, which captures its answers and limits the number of requests in flight."""

    def __init__(self, *, lane: Lane, **options: Any) -> None:
        self._lane = lane
        # The SDK's ten minutes are too short for the last of a crowd.
        options.setdefault("timeout", Timeout(_ANSWER_S, connect=_CONNECT_S))
        super().__init__(**options)

    def copy(self, *, _extra_kwargs: Mapping[str, Any] | None = None, **options: Any) -> Self:
        """Return a client of the same model with other SDK options, like the SDK's own `copy`."""
        return super().copy(_extra_kwargs={**(_extra_kwargs or {}), "lane": self._lane}, **options)

    with_options = copy  # the SDK's alias would still name its own `copy`

    async def post(self, path: str, **kwargs: Any) -> Any:  # type: ignore[override]
        """Send a request of the SDK; in a chat completion the model's name becomes that of its current policy."""
        # All resources of the SDK go through `post`, streams, raw responses and `.parse()` included.
        await _hold(self._client)
        body = kwargs.get("body")
        if path != _CHAT or not isinstance(body, Mapping):
            with context.suppress():
                return await super().post(path, **kwargs)
        asked = cast("Mapping[str, Any]", body)
        if kwargs.get("stream") and context.CAPTURED.get() is not None:
            raise ConfigError("a streamed answer cannot be captured; leave stream=True out in capture_auto_trajectory")
        try:
            return await self._chat(asked, kwargs)
        except NotFoundError:
            # Another process may have promoted a policy and unloaded this one since the last look.
            if not await self._lane.policy_changed():
                raise
            return await self._chat(asked, kwargs)

    async def _chat(self, asked: Mapping[str, Any], kwargs: dict[str, Any]) -> Any:
        lane = self._lane
        body = {**asked, "model": lane.policy() if asked["model"] == lane.name else asked["model"]}
        with lane.gates.at("") as gate:
            async with gate:
                with context.suppress():
                    answer: Any = await cast("Any", super()).post(_CHAT, **{**kwargs, "body": body})
        # `with_raw_response` gives a response that keeps what it has parsed, so the caller gets the same object.
        whole = answer.parse() if isinstance(answer, LegacyAPIResponse) else answer
        if isinstance(whole, ChatCompletion) and whole.choices:
            capture(asked.get("messages") or (), whole.choices[0], asked.get("tools"))
        return answer


async def _hold(http_client: Any) -> None:
    """Keep an HTTP client open until its event loop ends, even when the script drops it."""
    # The garbage collector would close its sockets without telling the loop. A later connection that gets the number of
    # such a socket would then never be woken for its answer.
    if http_client not in _held:
        _held[http_client] = holding = _until_the_loop_ends(http_client)
        await anext(holding)


async def _until_the_loop_ends(http_client: Any) -> AsyncGenerator[None]:
    try:
        yield  # `asyncio.run` closes generators that are not finished before it closes its loop
    finally:
        del _held[http_client]
        await http_client.aclose()


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run the coroutine and return its calls through `model.openai_client()` as a trajectory.

    The trajectory's reward is NaN until the script sets it, afterwards or inside the coroutine (`auto_trajectory()`).
    If the coroutine raises, the exception carries the trajectory into its group's `exceptions`.
    """
    trajectory = Trajectory(reward=math.nan)
    token = context.CAPTURED.set(trajectory)
    try:
        await coroutine
    except BaseException as error:
        remember(error, trajectory)
        raise
    finally:
        context.CAPTURED.reset(token)
    return trajectory.finish()


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...


@overload
def auto_trajectory(*, required: bool = ...) -> Trajectory | None: ...


def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory that `capture_auto_trajectory` is recording for the calling coroutine.

    Without one the result is `None`; with `required` a `ConfigError` is raised instead.
    """
    found: Trajectory | None = context.CAPTURED.get()
    if found is None and required:
        raise ConfigError("nothing is captured here; run this in `await art.capture_auto_trajectory(coroutine)`")
    return found


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the `capture_yielded_trajectory` around the calling coroutine; the newest one counts.

    For code that cannot return it, such as a solver of a benchmark suite.
    """
    if (made := _YIELDED.get()) is None:
        raise ConfigError("nobody takes it here; run this in `await art.capture_yielded_trajectory(coroutine)`")
    made[:] = [trajectory]


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run the coroutine and return the trajectory that it handed to `yield_trajectory`; `ConfigError` if it did not."""
    made: list[Trajectory] = []
    token = _YIELDED.set(made)
    try:
        await coroutine
    finally:
        _YIELDED.reset(token)
    if not made:
        raise ConfigError("the coroutine yielded no trajectory; call `art.yield_trajectory(trajectory)` in it")
    return made[0]


def capture(messages: Sequence[Any], choice: Choice, tools: Sequence[Any] | None) -> None:
    """Append a request and its answer to the trajectory that `capture_auto_trajectory` is recording, if it is."""
    trajectory: Trajectory | None = context.CAPTURED.get()
    if trajectory is None:
        return
    offered, asked = list(tools) if tools else None, list(messages)
    if not trajectory.messages_and_choices:
        trajectory.messages_and_choices, trajectory.tools = [*asked, choice], offered
        return
    continued = [each for each in trajectory.histories() if each.tools == offered and _goes_on(each, asked)]
    longest = max(continued, key=lambda history: len(history.messages_and_choices), default=None)
    if longest is None:
        trajectory.additional_histories.append(History(messages_and_choices=[*asked, choice], tools=offered))
    else:
        # In place: `histories()` gives a new object for the main conversation, with the trajectory's own list.
        longest.messages_and_choices += [*asked[len(longest.messages_and_choices) :], choice]


def _goes_on(history: History, asked: Sequence[Any]) -> bool:
    said, begun = history.messages(), asked[: len(history.messages_and_choices)]
    # Canonical: a message that went through an SDK object has nulls and a key order of its own.
    return len(said) == len(begun) and all(
        isinstance(theirs, Mapping) and trajectories.canonical(cast("JSON", mine)) == trajectories.canonical(theirs)
        for mine, theirs in zip(said, begun, strict=True)
    )
