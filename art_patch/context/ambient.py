"""What the ambient context says: which trajectory, span and group surround the code that runs now.

It lives in the current OpenTelemetry context, so it follows whatever carries that context: tasks, `asyncio.to_thread`,
instrumented executors, `bind()`. One immutable object under one key, because every recorded call reads it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.context.context import Context

from art_patch.records import TrajectoryInfo

_KEY = otel.create_key("art-patch-ambient")


@dataclass(slots=True)
class OpenTrajectory:
    """A `trajectory()` block that is being executed.

    Attributes:
        info: what is known of it.
        used: whether anything was recorded under it; a block without a call leaves no row.
    """

    info: TrajectoryInfo
    used: bool = False


@dataclass(frozen=True, slots=True)
class Ambient:
    """The surroundings of a piece of code."""

    open: OpenTrajectory | None = None
    span_id: str | None = None
    group_key: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What a call takes along when it starts.

    Attributes:
        trajectory: explicit, or of the active OpenTelemetry trace; `None` leaves the call to stitching.
        span_id: innermost span.
        group_key: key of the surrounding `group()`.
    """

    trajectory: TrajectoryInfo | None = None
    span_id: str | None = None
    group_key: str | None = None


_NOTHING = Ambient()
_NOBODY = Identity()


def ambient() -> Ambient:
    """Return the surroundings of the running code."""
    found = otel.get_value(_KEY)
    return found if isinstance(found, Ambient) else _NOTHING


def identify(*, using: bool = True) -> Identity:
    """Return the identity of a call that starts now; `using` marks its trajectory as used."""
    current = otel.get_current()
    here = current.get(_KEY)
    if isinstance(here, Ambient):
        if here.open is not None:
            here.open.used = here.open.used or using
            return Identity(here.open.info, here.span_id, here.group_key)
    else:
        here = _NOTHING
    active = trace.get_current_span(current).get_span_context()
    if active.is_valid:
        info = TrajectoryInfo(f"{active.trace_id:032x}", time.time(), "otel", group_key=here.group_key)
        return Identity(info, here.span_id or f"{active.span_id:016x}", here.group_key)
    return _NOBODY if here is _NOTHING else Identity(None, here.span_id, here.group_key)


@dataclass(frozen=True, slots=True)
class Entered:
    """What `enter` changed, for `leave` to take back."""

    before: Context
    inside: Context
    was: Ambient
    now: Ambient


def enter(now: Ambient) -> Entered:
    """Make `now` the surroundings."""
    before = otel.get_current()
    inside = otel.set_value(_KEY, now, before)
    otel.attach(inside)
    return Entered(before, inside, ambient_of(before), now)


def leave(entered: Entered) -> None:
    """Restore the surroundings from before `enter`.

    The old context is attached again instead of detaching by token: a token only works in the very context that made
    it, and OpenTelemetry logs an error where a generator is finalised in another task. If somebody attached a context
    on top of ours and forgot it, theirs stays, without us in it. If ours is not in force here, nothing is touched.
    """
    current = otel.get_current()
    if current is entered.inside:
        otel.attach(entered.before)
    elif ambient_of(current) is entered.now:
        otel.attach(otel.set_value(_KEY, entered.was, current))


def ambient_of(context: Context) -> Ambient:
    """Return the surroundings that `context` holds."""
    found = context.get(_KEY)
    return found if isinstance(found, Ambient) else _NOTHING


def grouped(here: Ambient, key: str) -> Ambient:
    """Return `here` inside a group."""
    return replace(here, group_key=key)
