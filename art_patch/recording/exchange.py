"""One call in flight: its raw bytes, and facts such as times, policy and trajectory. Nothing is parsed here.

An exchange is made when the call starts, with the trajectory and span of that moment. It is finished exactly once, by
the first of these events: the end of the request, the end of the stream, `close()`, or the garbage collection of the
stream. Finishing puts the exchange on the recorder's queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

from art_patch.types import UPSTREAM, Api, TrajectoryInfo

if TYPE_CHECKING:
    from opentelemetry.context.context import Context

    from art_patch.recording.chat import Asked


# How the call ended. `closed`: the app left the stream early, or right after its last event.
Ended = Literal["complete", "closed", "failed", "cancelled"]

# What an exchange weighs in the queue besides its bytes: the object, its lists, and its part of the thread's work.
FIXED_SIZE = 1024

# So much of an answer is kept in memory while it comes.
MOST_ANSWER_BYTES = 64 << 20


class Queue(Protocol):
    """The queue that a finished exchange is put on; `Recorder` implements it."""

    @property
    def generation(self) -> int:
        """A number that grows with each fork, by which a child process recognises and drops its parent's exchanges."""
        ...

    def put(self, item: Exchange, size: int) -> bool:
        """Queue an item of `size` bytes; return false if it is dropped."""
        ...


class Exchange:
    """Request bytes, answer bytes and facts of one call of the app, its retries and its fallback included."""

    __slots__ = (
        "_first", "_held", "_once", "_recorder", "_started", "answer", "api", "asked", "decode", "ended", "error",
        "fallback", "finished", "generation", "group_key", "id", "in_control_group", "keeps_logprobs", "learn",
        "media_replaced", "otel_context", "policy", "request", "requested_model", "run_id", "server", "shadow",
        "shadow_of", "span_id", "started_at", "streamed", "trajectory",
    )  # fmt: skip

    def __init__(
        self,
        recorder: Queue,
        requested_model: str,
        trajectory: TrajectoryInfo | None = None,
        span_id: str | None = None,
        group_key: str | None = None,
    ) -> None:
        """Start the clock of a call. Without a trajectory, the recorder's thread finds one."""
        self._recorder = recorder
        self._once = [None]
        self._first = 0.0
        self._held = 0
        self.generation = recorder.generation
        self.requested_model = requested_model
        self.api: Api = "chat"
        self.trajectory = trajectory
        self.span_id = span_id
        self.group_key = group_key
        self.request: bytes = b""
        # What the recorder's threads make of the request; until then it is bytes.
        self.asked: Asked | None = None
        self.media_replaced = False
        self.id = self.run_id = ""  # of the call, and of its trajectory if the call belongs to no other
        self.answer: list[bytes] = []
        self.decode: Callable[[bytes], bytes] | None = None
        self.streamed = False
        self.keeps_logprobs = False
        self.policy: str | None = UPSTREAM
        self.fallback: str | None = None
        self.in_control_group = False
        self.learn = True  # whether its run may be learned from
        self.error: str | None = None
        self.shadow = False  # whether policies are asked the same in the background
        self.shadow_of: str | None = None
        self.otel_context: Context | None = None  # where the call started, if spans are wanted
        self.server: object = None  # its text is the address that was asked; made by the recorder's thread
        self.ended: Ended = "complete"
        self.finished = 0.0
        # Wall-clock time says when; durations come from `perf_counter`, which no clock change disturbs.
        self.started_at = time.time()
        self._started = time.perf_counter()

    def saw(self, chunk: bytes) -> None:
        """Add a chunk of the answer's body, or the complete body, to the recorded answer."""
        if not self._first:
            self._first = time.perf_counter()
        self._held += len(chunk)
        if self._held <= MOST_ANSWER_BYTES:
            self.answer.append(chunk)
        else:
            self.answer.clear()

    def forget_answer(self) -> None:
        """Drop the request, answer and policy of a failed attempt, before the next attempt starts."""
        self.request = b""
        self.answer = []
        self._held = 0
        self.decode = None
        self.streamed = False
        self.policy = UPSTREAM
        self._first = 0.0

    def finish(self, ended: Ended, error: str | None = None) -> None:
        """End the call and put it on the recorder's queue. Only the first `finish` has an effect."""
        try:
            self._once.pop()  # atomic, so only one of two threads gets past this line
        except IndexError:
            return
        self.finished = time.perf_counter()
        self.ended = ended
        if error is not None:
            self.error = error
        # A stream without an end fits into no queue, so that its call is dropped and counted.
        answer_bytes = self._held if self._held <= MOST_ANSWER_BYTES else 1 << 62
        self._recorder.put(self, FIXED_SIZE + len(self.request) + answer_bytes)

    def drop(self) -> None:
        """End the call without a record; a later `finish` has no effect."""
        self._once.clear()

    @property
    def times(self) -> tuple[float, float]:
        """Seconds from the start to the end and to the first chunk (0 if there was none)."""
        return self.finished - self._started, self._first and self._first - self._started

    @times.setter
    def times(self, read: tuple[float, float]) -> None:
        self._started, (self.finished, self._first) = 0.0, read

    def whole_answer(self) -> bytes:
        """Return the answer's body, unpacked."""
        raw = b"".join(self.answer)
        if raw and self.decode is not None:
            try:
                raw = self.decode(raw)
            except Exception:  # a compressed stream that the app left in the middle
                raw = b""
        self.answer, self.decode = [raw], None
        return raw

    @property
    def asked_api(self) -> Api:
        """The surface of the request that was sent: a policy is always asked by a chat completion."""
        return self.api if self.policy is UPSTREAM else "chat"

    @property
    def is_finished(self) -> bool:
        """Whether the call has ended and was put on the recorder's queue."""
        return not self._once

    @property
    def duration_ms(self) -> float:
        """Time from the start of the call to its last byte."""
        return (self.finished - self._started) * 1000

    @property
    def ttft_ms(self) -> float | None:
        """Time from the start of the call to the first chunk; `None` without a stream."""
        return (self._first - self._started) * 1000 if self.streamed and self._first else None


Purpose = Literal["sample", "canary", "shadow", "challenger", "control"]


def in_share(key: str, share: float, purpose: Purpose) -> bool:
    """Return whether a hash of `key` and `purpose` falls into `share` (0 to 1). All processes get the same result."""
    if share >= 1:
        return True
    if share <= 0:
        return False
    # The purpose is part of the hash. Otherwise the share that is recorded would be the very share that the canary
    # answers.
    digest = blake2b(f"{purpose}:{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
