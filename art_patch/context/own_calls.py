"""Records calls that libraries send past the OpenAI SDK, if an integration hears of them. They are never routed.

The patch cannot see such a call. It only sees that one goes by (`patching.sdk.bypass`), and surrounds it with a
`Passage`. An integration that hears of the call at that moment records it here, once; else it is counted as unseen. No
call that the patch sees takes such a route, so no call is recorded twice.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from art_patch.context.ambient import identify
from art_patch.recording import Exchange, begin_exchange, described
from art_patch.types import Api


class Passage:
    """A call on its way past the patch.

    Attributes:
        recorded: whether an integration records the call.
        open: whether the call is being sent. A task that began meanwhile keeps the passage, and may send calls later.
    """

    __slots__ = ("open", "recorded")

    def __init__(self) -> None:
        self.recorded = self.open = False


_PASSAGE: ContextVar[Passage | None] = ContextVar("art_patch_passage", default=None)


@contextmanager
def passing(passage: Passage) -> Generator[None]:
    """Surround the function, or the coroutine, that sends a call past the patch."""
    token = _PASSAGE.set(passage)
    passage.open = True
    try:
        yield
    finally:
        passage.open = False
        with suppress(ValueError):  # the garbage collector may close a coroutine in another context
            _PASSAGE.reset(token)


def is_passing() -> bool:
    """Return whether a call is on its way past the patch in the current context."""
    passage = _PASSAGE.get()
    return passage is not None and passage.open


class OwnCall:
    """A call that an integration records. It ends once, with the first report of its end."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def end(self, answer: str | bytes | None = None, *, error: BaseException | str | None = None) -> None:
        """Report the answer.

        Args:
            answer: the whole answer as OpenAI's JSON, also for a stream; `None` if the call was given up or failed.
            error: the exception or message of a call that failed.
        """
        if answer is not None and not self._exchange.is_finished:
            self._exchange.saw(answer.encode() if isinstance(answer, str) else answer)
        if error is not None:
            self._exchange.finish("failed", described(error))
        else:
            self._exchange.finish("closed" if answer is None else "complete")


def record_call(body: Mapping[str, Any], *, api: Api = "chat") -> OwnCall | None:
    """Record a call that goes past the patch now; `None` if none does, or the call is not to be recorded.

    An integration calls it in the context that makes the call, before the call is sent. `body` is OpenAI's JSON.
    """
    passage = _PASSAGE.get()
    # Outside of a passage the patch sees the call itself, and it would be recorded twice.
    if passage is None or not passage.open:
        return None
    who = identify(call=True)
    if who.suppressed:
        return None
    exchange = begin_exchange(body, who.trajectory, who.span_id, who.group_key, who.otel_context)
    if exchange is None:
        return None
    exchange.api = api
    exchange.request = json.dumps(body, default=repr).encode()
    passage.recorded = True
    return OwnCall(exchange)
