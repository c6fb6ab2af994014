"""Records calls that libraries send without the OpenAI SDK, if an integration reports them. They are never routed.

Some libraries have an HTTP client of their own. The patch notices that such a library sends a call, but cannot read it:
`patching.sdk.bypass` only wraps the sending function and surrounds it with a `Passage`. If an integration reports the
call inside the passage, the call is recorded here; if none does, the call is only counted in `status().bypasses`. A
call that the SDK sends is outside of every passage, so `record_call` refuses it, and no call is recorded twice.
"""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from art_patch.context.ambient import identify
from art_patch.recording import Exchange, begin_exchange, described
from art_patch.types import Api


class Passage:
    """A call that a library is sending without the OpenAI SDK.

    It is `open` while it is being sent. A task that was started inside inherits the passage and may send other calls
    after its end, so an ended passage counts for nothing.
    """

    __slots__ = ("open", "recorded")

    def __init__(self) -> None:
        self.recorded = self.open = False  # recorded: by an integration


_PASSAGE: ContextVar[Passage | None] = ContextVar("art_patch_passage", default=None)


@contextmanager
def passing(passage: Passage) -> Generator[None]:
    """Open the passage while the block runs, which sends a call."""
    token = _PASSAGE.set(passage)
    passage.open = True
    try:
        yield
    finally:
        passage.open = False
        with suppress(ValueError):  # the garbage collector may close a coroutine in another context
            _PASSAGE.reset(token)


def is_passing() -> bool:
    """Return whether the running code is inside a function that sends a call without the OpenAI SDK."""
    passage = _PASSAGE.get()
    return passage is not None and passage.open


class OwnCall:
    """A call that an integration records. Only the first `end()` counts."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def end(self, answer: str | bytes | None = None, *, error: BaseException | str | None = None) -> None:
        """Report the answer, or why there is none. The call is then queued for the store.

        Args:
            answer: the complete answer as OpenAI's JSON, assembled by the integration if it was streamed; `None` if the
                app stopped reading it or the call failed.
            error: the exception or message of a call that failed.
        """
        if answer is not None and not self._exchange.is_finished:
            self._exchange.saw(answer.encode() if isinstance(answer, str) else answer)
        ended = "failed" if error is not None else "closed" if answer is None else "complete"
        self._exchange.finish(ended, described(error))


def record_call(body: Mapping[str, Any], *, api: Api = "chat") -> OwnCall | None:
    """Begin the record of a call that a library is about to send without the OpenAI SDK.

    An integration calls this in the task or thread that sends the call, before the call is sent. `body` is the request
    as OpenAI's JSON. The result is `None` if the running code sends no such call, or if the call is not to be recorded
    (mode `off`, `suppress()`, the app's `match`).
    """
    passage = _PASSAGE.get()
    # Outside of a passage the patch sees the call itself, and it would be recorded twice.
    if passage is None or not passage.open or (who := identify(call=True)).suppressed:
        return None
    exchange = begin_exchange(body, who.trajectory, who.span_id, who.group_key, who.otel_context)
    if exchange is None:
        return None
    exchange.api = api
    exchange.request = json.dumps(body, default=repr).encode()
    passage.recorded = True
    return OwnCall(exchange)
