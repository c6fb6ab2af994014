"""OpenTelemetry spans that an integration has registered, each with the trajectory and step that it belongs to.

A framework that emits spans keeps them active around its calls, in whatever task or thread. So no block of ours is
needed there: who knows the innermost span of a call knows the step. Bounded; the oldest are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import NamedTuple

from art_patch.types import Score, SpanInfo, TrajectoryInfo

MOST = 10_000


class OpenTrajectory:
    """A `trajectory()` block that is being executed.

    Attributes:
        info: what is known of it.
        used: whether anything was recorded under it; a block without a call leaves no row.
        waiting: steps that ended, and scores that were given, before the first call.
    """

    __slots__ = ("info", "used", "waiting")

    def __init__(self, info: TrajectoryInfo) -> None:
        self.info = info
        self.used = False
        self.waiting: list[SpanInfo | Score] = []

    def waited(self) -> list[SpanInfo | Score]:
        """Return what need not wait any longer; each once."""
        if not self.used:
            return []
        waiting, self.waiting = self.waiting, []
        return waiting


class RegisteredSpan(NamedTuple):
    """A span.

    Attributes:
        open: the trajectory that it is a part of.
        step_id: the step that it is, or is inside.
        below: the step of ours that was in force when it began; any other one in force now is inside the span.
    """

    open: OpenTrajectory
    step_id: str | None
    below: str | None


_spans: OrderedDict[int, RegisteredSpan] = OrderedDict()
# Re-entrant: the garbage collector may end a span, by closing its generator, while this thread begins another.
_lock = RLock()


def register(span_id: int, span: RegisteredSpan) -> None:
    """Remember a span."""
    with _lock:
        _spans[span_id] = span
        if len(_spans) > MOST:
            _spans.popitem(last=False)


def forget(span_id: int) -> None:
    """Forget a span that is over."""
    with _lock:
        _spans.pop(span_id, None)


def registered(span_id: int) -> RegisteredSpan | None:
    """Return what is known of a span."""
    return _spans.get(span_id)
