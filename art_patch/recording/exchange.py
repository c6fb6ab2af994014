"""One call in flight: what the hot path keeps of it. Raw bytes only; nothing is parsed here.

Made when the call starts, with the context of that moment. Finished exactly once, by whoever notices the end first:
the end of the request, the end of the stream, `close()`, or the garbage collector. Finishing puts it on the queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

from art_patch.types import UPSTREAM, Api, TrajectoryInfo

if TYPE_CHECKING:
    from opentelemetry.context.context import Context


# How the last byte came: `closed` is a stream that was given up, or left right after its last event.
Ended = Literal["complete", "closed", "failed", "cancelled"]

# What an exchange weighs in the queue besides its bytes: the object, its lists, its share of the thread's work.
FIXED_SIZE = 1024


class Queue(Protocol):
    """Takes exchanges that are finished: the recorder."""

    @property
    def generation(self) -> int:
        """Grows with each store that is opened anew, so that an exchange knows whether its trajectory is in it."""
        ...

    def put(self, item: Exchange, size: int) -> bool:
        """Take one, which weighs `size` bytes; false if it is dropped."""
        ...


class Exchange:
    """Request bytes, answer bytes and circumstances of one logical call, retries and fallback included."""

    __slots__ = (
        "_first",
        "_once",
        "_recorder",
        "_started",
        "answer",
        "api",
        "decode",
        "ended",
        "error",
        "fallback",
        "finished",
        "generation",
        "group_key",
        "keeps_logprobs",
        "otel_context",
        "policy",
        "request",
        "requested_model",
        "server",
        "shadow",
        "shadow_of",
        "span_id",
        "started_at",
        "streamed",
        "trajectory",
    )

    def __init__(
        self,
        recorder: Queue,
        requested_model: str,
        trajectory: TrajectoryInfo | None = None,
        span_id: str | None = None,
        group_key: str | None = None,
    ) -> None:
        """Start the clock.

        Args:
            recorder: takes the exchange when it is finished.
            requested_model: the model that the app asked for.
            trajectory: the trajectory that the context names; `None` leaves it to stitching.
            span_id: innermost span.
            group_key: key of the surrounding `group()`, for a trajectory that has yet to be found.
        """
        self._recorder = recorder
        self._once = [None]
        self._first = 0.0
        self.generation = recorder.generation
        self.requested_model = requested_model
        self.api: Api = "chat"
        self.trajectory = trajectory
        self.span_id = span_id
        self.group_key = group_key
        self.request: bytes = b""
        self.answer: list[bytes] = []
        self.decode: Callable[[bytes], bytes] | None = None
        self.streamed = False
        self.keeps_logprobs = False
        self.policy: str | None = UPSTREAM
        self.fallback: str | None = None
        self.error: str | None = None
        self.shadow = False  # a policy is to be asked too, once this is recorded
        self.shadow_of: str | None = None
        self.otel_context: Context | None = None  # where the call started, if spans are wanted
        self.server: object = None  # whose text is the address that was asked
        self.ended: Ended = "complete"
        self.finished = 0.0
        self.started_at = time.time()
        self._started = time.perf_counter()

    def saw(self, chunk: bytes) -> None:
        """Keep one chunk of the answer's body."""
        if not self._first:
            self._first = time.perf_counter()
        self.answer.append(chunk)

    def forget_answer(self) -> None:
        """Drop what one leg brought, before another leg is tried."""
        self.request = b""
        self.answer = []
        self.decode = None
        self.streamed = False
        self.policy = UPSTREAM
        self._first = 0.0

    def finish(self, ended: Ended, error: str | None = None) -> None:
        """Hand the exchange to the recorder; only the first call does anything."""
        try:
            self._once.pop()  # atomic, so two threads cannot both get here
        except IndexError:
            return
        self.finished = time.perf_counter()
        self.ended = ended
        if error is not None:
            self.error = error
        self._recorder.put(self, FIXED_SIZE + len(self.request) + sum(map(len, self.answer)))

    @property
    def is_finished(self) -> bool:
        """Whether it was handed to the recorder."""
        return not self._once

    @property
    def duration_ms(self) -> float:
        """From the start of the call to its last byte."""
        return (self.finished - self._started) * 1000

    @property
    def ttft_ms(self) -> float | None:
        """From the start of the call to the first streamed chunk."""
        return (self._first - self._started) * 1000 if self.streamed and self._first else None


Purpose = Literal["sample", "canary", "shadow", "challenger"]


def in_share(key: str, share: float, purpose: Purpose) -> bool:
    """Whether `key` is among the `share` (0..1) of all keys.

    The purpose is hashed along: otherwise the few that are recorded would be the very ones that the canary serves.
    """
    if share >= 1:
        return True
    if share <= 0:
        return False
    digest = blake2b(f"{purpose}:{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
