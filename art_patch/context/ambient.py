"""The surroundings of the code that runs: its trajectory, span and group, from `art_patch` or from OpenTelemetry.

The surroundings live in the current OpenTelemetry context, so whatever carries that context carries them too: tasks,
`asyncio.to_thread`, instrumented executors, `bind()`. The module `threads` carries them into new threads.

Code that was started inside a block (`with trajectory()`, `span()`, `group()`, `suppress()`) may run on after the block
has ended. If it runs in the thread that entered the block, such as a task, it keeps the surroundings of that block. In
any other thread it gets those of the innermost outer block that is still open: a connection pool's thread that was
started inside a block must not belong to that block for ever.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from opentelemetry import context as otel
from opentelemetry import trace

from art_patch.types import Correction, Score, SpanInfo, TrajectoryInfo

# One key for everything: each `set_value` copies the whole context, and each call reads it.
_KEY = otel.create_key("art-patch-ambient")


class Ambient:
    """The trajectory, span, group and suppression that apply to a piece of code; fixed when its block is entered."""

    __slots__ = ("ended", "group_key", "learn", "open", "outer", "span_id", "suppressed", "thread")

    def __init__(self) -> None:
        self.open: OpenTrajectory | None = None  # the innermost trajectory
        self.span_id: str | None = None
        self.group_key: str | None = None
        self.suppressed = False
        self.learn = True  # false inside any block that says so, whatever the blocks inside it say
        self.outer: Ambient | None = None  # of the nearest outer block that has not ended
        self.thread = 0  # id of the thread that entered the innermost block; 0 for a copy, which never ends
        self.ended = False  # whether the program has left the innermost block

    def copy(self) -> "Ambient":
        """Return a copy for a nested block. The caller changes the copy before it enters the block."""
        new = Ambient()
        new.open, new.span_id = self.open, self.span_id
        new.group_key, new.suppressed, new.learn = self.group_key, self.suppressed, self.learn
        return new


@dataclass(slots=True)
class Identity:
    """The trajectory, span and group that a call, score or span belongs to, read at the moment it starts."""

    # The explicit trajectory, or that of the active OpenTelemetry trace. With `None` the recorder looks for an earlier
    # conversation that the call extends (stitching).
    trajectory: TrajectoryInfo | None = None
    span_id: str | None = None
    group_key: str | None = None
    suppressed: bool = False  # whether the call is inside `suppress()`, and so neither recorded nor routed
    # The OpenTelemetry context in which the call started, for the span that `recording` makes of it; `None` if the
    # app's own instrumentation has made a span of this call already.
    otel_context: otel.Context | None = field(default=None, compare=False, repr=False)
    learn: bool = True  # whether the run of this call, score or span may be learned from


_NOTHING = Ambient()
_SUPPRESSED = Identity(suppressed=True)


def surroundings() -> Ambient:
    """Return the trajectory, span, group and suppression that apply to the running code, in its thread."""
    return _in_force(ambient_of(otel.get_current()))


def registered_around(here: Ambient) -> "RegisteredSpan | None":
    """Return the active OpenTelemetry span if it is registered and no newer `trajectory()` or `span()` is inside it."""
    span = _spans.get(trace.get_current_span().get_span_context().span_id)
    return span if span is not None and here.open in (None, span.open) and here.span_id == span.below else None


def identify(*, using: bool = True, call: bool = False) -> Identity:
    """Return the identity of the call, score or span that the running code makes now.

    Args:
        using: whether a record is made under this identity; then its trajectory is marked as used and gets stored.
        call: whether the identity is for a call of the SDK. `suppress()` hides calls, but no scores and spans.
    """
    current = otel.get_current()
    # Not `surroundings()`: this runs in every call, and one look at the context is enough.
    here = current.get(_KEY)
    if not isinstance(here, Ambient):
        here = _NOTHING
    elif here.ended:
        here = _in_force(here)
    # Scores and spans inside `suppress()` still belong to their trajectory.
    if here.suppressed and call:
        return _SUPPRESSED
    span, context = trace.get_current_span(current), current
    active = span.get_span_context()
    if active.is_valid and is_call_span(span):
        # The surroundings of the instrumented call count: the parent of that span, which may be `None`.
        active, context = getattr(span, "parent", None), None
    known = None if active is None else _spans.get(active.span_id)
    # A registered span says more than its trace, unless a block of the app opened another trajectory inside it.
    if known is not None and here.open in (None, known.open):
        known.open.used = known.open.used or using
        step_id = known.step_id if here.span_id == known.below else here.span_id
        return Identity(known.open.info, step_id, here.group_key, False, context, here.learn and known.learn)
    if here.open is not None:
        here.open.used = here.open.used or using
        return Identity(here.open.info, here.span_id, here.group_key, False, context, here.learn)
    if active is not None and active.is_valid:
        key, span_id = f"{active.trace_id:032x}", here.span_id or f"{active.span_id:016x}"
        info = TrajectoryInfo(key, time.time(), "otel", group_key=here.group_key, learn=here.learn)
        return Identity(info, span_id, here.group_key, False, context, here.learn)
    return Identity(None, here.span_id, here.group_key, False, context, here.learn)


# The contexts from before and after `enter`, which `leave` needs.
Entered: TypeAlias = tuple[otel.Context, otel.Context]


def enter(now: Ambient) -> Entered:
    """Make `now` the surroundings of the code that runs next in this context, until `leave`."""
    before = otel.get_current()
    # A block that has ended is skipped, so that it is not kept alive by those inside it.
    now.outer, now.thread = _open_ones(ambient_of(before)), threading.get_ident()
    inside = otel.set_value(_KEY, now, before)
    otel.attach(inside)  # the token is not kept; `leave` says why
    return before, inside


def leave(entered: Entered) -> None:
    """Mark the block as ended and restore the surroundings from before `enter`."""
    before, inside = entered
    now, current = ambient_of(inside), otel.get_current()
    now.ended = True
    # The old context is attached again, instead of detaching by token: a token only works in the context that made it,
    # and OpenTelemetry logs an error if a generator is finalised in another task. If other code attached a context on
    # top of ours and forgot it, that context stays without our surroundings. If they are not in force, nothing changes.
    if current is inside:
        otel.attach(before)
    elif ambient_of(current) is now:
        otel.attach(otel.set_value(_KEY, ambient_of(before), current))


def ambient_of(context: otel.Context) -> Ambient:
    """Return the surroundings that an OpenTelemetry context holds; empty ones if it holds none."""
    found = context.get(_KEY)
    return found if isinstance(found, Ambient) else _NOTHING


def to_carry() -> Ambient | None:
    """Return the surroundings that a new thread inherits from the running code, if any."""
    here = surroundings()
    return None if here is _NOTHING else here


def put_on(here: Ambient | None) -> otel.Context:
    """Make `here` the surroundings of this thread (`None`: no surroundings). Return the context to restore later."""
    before = otel.get_current()
    otel.attach(otel.set_value(_KEY, here, before))
    return before


def lasting() -> otel.Context:
    """Return a copy of the current context that keeps its trajectory, span and group after their blocks have ended."""
    current = otel.get_current()
    here = ambient_of(current)
    return current if here is _NOTHING else otel.set_value(_KEY, _in_force(here).copy(), current)


def _in_force(here: Ambient) -> Ambient:
    """Return the part of `here` that holds in this thread."""
    return here if not here.ended or here.thread == threading.get_ident() else _open_ones(here) or _NOTHING


def _open_ones(here: Ambient) -> Ambient | None:
    """Return the innermost surroundings that have not ended, and forget those around them that have."""
    # Forgetting keeps the chain short, even if each task starts the next one from inside its own.
    first = node = _skipped(here)
    while node is not None:
        node.outer = _skipped(node.outer)
        node = node.outer
    return first


def _skipped(here: Ambient | None) -> Ambient | None:
    while here is not None and here.ended:
        here = here.outer
    return here


# A span of one call is no run of the agent: as a trajectory, it would tear every conversation into single calls.
_CALLS = frozenset({"chat", "completion", "generate_content", "responses", "text_completion"})

# Attribute -> the values that make its span one of a call; `None`: any.
_MARKS: tuple[tuple[str, frozenset[str] | None], ...] = (
    ("gen_ai.operation.name", _CALLS),  # OpenTelemetry; its agents and tools have other operations
    ("openinference.span.kind", frozenset({"LLM"})),
    ("langfuse.observation.type", frozenset({"generation"})),
    ("llm.request.type", None),  # traceloop
)


def is_call_span(span: Any) -> bool:
    """Return whether an OpenTelemetry span stands for one call of a model, by its attributes."""
    attributes: Mapping[str, Any] | None = getattr(span, "attributes", None)
    return bool(attributes) and any(
        name in attributes and (values is None or attributes[name] in values) for name, values in _MARKS
    )


MOST_SPANS = 10_000


class OpenTrajectory:
    """A trajectory whose `with` block, or whose run of an integration, has not ended."""

    __slots__ = ("info", "used", "waiting")

    def __init__(self, info: TrajectoryInfo) -> None:
        self.info = info
        self.used = False  # whether anything was recorded under it. An unused trajectory leaves no row in the store
        # Steps that ended and what was scored before the first call; they are stored after that call.
        self.waiting: list[SpanInfo | Score | Correction] = []

    def waited(self) -> list[SpanInfo | Score | Correction]:
        """Return the waiting records and empty the list, if a call was recorded by now; else return nothing."""
        if not self.used:
            return []
        waiting, self.waiting = self.waiting, []
        return waiting


class RegisteredSpan(NamedTuple):
    """An OpenTelemetry span that an integration has registered."""

    open: OpenTrajectory
    step_id: str | None  # the step of the trajectory that this span stands for, or that contains the span
    # Id of art_patch's own span that was active when this span began. If a different one is active later, it was opened
    # inside this span and is the parent of new calls.
    below: str | None
    learn: bool = True  # whether the calls inside may be learned from


_spans: OrderedDict[int, RegisteredSpan] = OrderedDict()
# Re-entrant: the garbage collector may end a span, by closing its generator, while this thread begins another one.
_lock = threading.RLock()


def register(span_id: int, span: RegisteredSpan) -> None:
    """Remember to which trajectory and step the OpenTelemetry span with this id belongs."""
    with _lock:
        _spans[span_id] = span
        if len(_spans) > MOST_SPANS:
            _spans.popitem(last=False)


def forget(span_id: int) -> None:
    """Forget a registered OpenTelemetry span that has ended."""
    with _lock:
        _spans.pop(span_id, None)


class Passage:
    """A call that a library is sending without the OpenAI SDK, with an HTTP client of its own.

    The patch notices such a call but cannot read it: `patching.sdk.bypass` only surrounds the sending function with a
    passage. If an integration reports the call inside the passage, `integration.record_call` records it. The passage is
    `open` while the call is being sent. A task that was started inside inherits the passage and may send other calls
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


def passage_around() -> Passage | None:
    """Return the open passage around the running code: a function that sends a call without the OpenAI SDK."""
    passage = _PASSAGE.get()
    return passage if passage is not None and passage.open else None
