"""A model's own client: the OpenAI SDK's, with room for a crowd, and known to what captures trajectories.

A subclass and not a patch: the SDK's resources all go through `post`. The model's name stands for the policy that
serves at the moment of the call, `NAME@STEP` for that very one. The exact tokens hang on each choice already, as the
address is that of the engine's `exact_route`; an answer read as a stream is nobody's choice and carries none.

A client stays open until its event loop ends, dropped or not: the collector closes sockets behind the
loop's back, and a connection that gets the number of such a socket is never told that its answer is there.

Calls are not recorded by `patch()`, if the script uses it too: what is learned is what the script hands in, once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

from openai import AsyncOpenAI, NotFoundError, Timeout
from openai._legacy_response import LegacyAPIResponse
from openai.types.chat import ChatCompletion

from art_patch.context import suppress
from art_patch.rollouts.capture import capture, refuse_stream
from art_patch.rollouts.decorators import Gates

MOST_AT_ONCE = 256
"""Requests in flight; the others of a thousand rollouts wait here, where waiting costs nothing and cannot time out."""

_CHAT = "/chat/completions"
_ANSWER_S, _CONNECT_S = 1200.0, 60.0  # a crowd that arrives at once waits for the door, too


_held: dict[Any, AsyncGenerator[None]] = {}
"""HTTP clients that are open, and what closes them when their loop ends, as `asyncio.run` ends what is generated."""


@dataclass(frozen=True, slots=True)
class Lane:
    """How a client's calls reach their model.

    Attributes:
        policy: name in a request -> name that the engine serves.
        refresh: looks who serves now; called when the engine does not know a policy any more.
        gates: keep a crowd from the engine's door.
    """

    policy: Callable[[str], str]
    refresh: Callable[[], Awaitable[None]] | None = None
    gates: Gates = field(default_factory=lambda: Gates(MOST_AT_ONCE))


class ModelClient(AsyncOpenAI):
    """See the module."""

    def __init__(self, *, lane: Lane, **options: Any) -> None:
        """Ask along `lane`; the options are the SDK's."""
        self._lane = lane
        options.setdefault("timeout", Timeout(_ANSWER_S, connect=_CONNECT_S))
        super().__init__(**options)

    def copy(self, *, _extra_kwargs: Mapping[str, Any] | None = None, **options: Any) -> Self:
        """Return a client with other options, as the SDK does."""
        return super().copy(_extra_kwargs={**(_extra_kwargs or {}), "lane": self._lane}, **options)

    with_options = copy

    async def post(self, path: str, **kwargs: Any) -> Any:  # type: ignore[override]
        """Send a request; see the module."""
        await _hold(self._client)
        body = kwargs.get("body")
        if path != _CHAT or not isinstance(body, Mapping):
            with suppress():
                return await super().post(path, **kwargs)
        asked = cast("Mapping[str, Any]", body)
        if kwargs.get("stream"):
            refuse_stream()
        try:
            return await self._chat(asked, kwargs)
        except NotFoundError:
            if self._lane.refresh is None:
                raise
            await self._lane.refresh()
            return await self._chat(asked, kwargs)

    async def _chat(self, asked: Mapping[str, Any], kwargs: dict[str, Any]) -> Any:
        lane = self._lane
        body = {**asked, "model": lane.policy(asked["model"])}
        with lane.gates.at("") as gate:
            async with gate:
                sent: dict[str, Any] = kwargs | {"body": body}
                with suppress():
                    answer: Any = await super().post(_CHAT, **sent)
        whole = answer.parse() if isinstance(answer, LegacyAPIResponse) else answer  # it keeps what it has parsed
        if isinstance(whole, ChatCompletion) and whole.choices:
            capture(asked.get("messages") or (), whole.choices[0], asked.get("tools"))
        return answer


async def _hold(http_client: Any) -> None:
    if http_client not in _held:
        _held[http_client] = holding = _until_the_loop_ends(http_client)
        await anext(holding)


async def _until_the_loop_ends(http_client: Any) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        del _held[http_client]
        await http_client.aclose()
