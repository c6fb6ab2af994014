"""Calls that libraries send past the OpenAI SDK, where an integration hears of them: recorded, but never routed.

The patch cannot see such a call; it only sees that one goes by (`patching.bypass`), and stands around it while it does.
An integration that hears of the call at that moment records it here, once. What is not told of by then is counted as
unseen. No call that the patch sees takes such a bypass, so nothing is recorded twice.
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
        recorded: whether an integration records it.
        open: whether it is being sent. A task that was begun meanwhile keeps the passage, and may send others later.
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
        with suppress(ValueError):  # the garbage collector closes a coroutine in whatever context it runs
            _PASSAGE.reset(token)


def is_passing() -> bool:
    """Whether a call is on its way past the patch, in the context in force."""
    passage = _PASSAGE.get()
    return passage is not None and passage.open


class OwnCall:
    """A call that an integration records. Ended once, by whatever tells of its end first."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def end(self, answer: str | bytes | None = None, *, error: BaseException | str | None = None) -> None:
        """Say what came back.

        Args:
            answer: the whole answer as OpenAI's JSON, also of a stream; `None` if it was given up or failed.
            error: why it failed.
        """
        if answer is not None and not self._exchange.is_finished:
            self._exchange.saw(answer.encode() if isinstance(answer, str) else answer)
        if error is not None:
            self._exchange.finish("failed", described(error))
        else:
            self._exchange.finish("closed" if answer is None else "complete")


def record_call(body: Mapping[str, Any], *, api: Api = "chat") -> OwnCall | None:
    """Record a call that goes past the patch now; `None` if it does not, or is none of ours.

    To be asked in the context that makes the call, before it is sent. Its trajectory and step are those in force.

    Args:
        body: what is sent, as OpenAI's JSON.
        api: whose request it is.
    """
    passage = _PASSAGE.get()
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
