"""Runs and their steps, for those who are told of them by events: the callbacks of an agent framework.

A `with trajectory()` needs the framework's own code around the agent's. A callback only hears that something began, in
whatever task or thread, and later that it ended. So a `Run` is an object that is held on to, its steps name their
parents, and `inside()` puts a step in force around the one thing that must know: the call of the SDK.

- Where the app has a `trajectory()`, a `span()` or an OpenTelemetry trace of its own, the run is that one, and its
  steps hang below what was in force. Else the run is a trajectory of its own. What the framework knows of the run is
  kept with a trajectory of its own, and with a trace, of which nobody else says a name or a session.
- A framework that emits OpenTelemetry spans needs no `inside()`: `take_span()` says which step a span is.
- A run under which nothing was recorded leaves no row, and neither do its steps and scores.
- What goes in and comes out is kept as JSON values, texts cut to 4,096 characters: it is there to be read and judged;
  what the model was told of it is in the messages.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

from art_patch._lib.faults import faults, is_fault
from art_patch._lib.ids import new_id
from art_patch.context.ambient import (
    Ambient,
    Entered,
    OpenTrajectory,
    RegisteredSpan,
    ambient,
    enter,
    forget,
    identify,
    leave,
    register,
    registered_around,
)
from art_patch.context.own_calls import OwnCall, record_call
from art_patch.recording import described, emit
from art_patch.types import JSON, REPLAY, Score, SpanInfo, SpanKind, TrajectoryInfo

P = ParamSpec("P")
R = TypeVar("R")
_Keep: TypeAlias = "Callable[[SpanInfo], None]"

MOST_CHARS = 4096
_MOST_ITEMS = 64
_DEEPEST = 6
# Asked of every value: a tuple is asked three times as fast as a union, and its first entry before the rest.
_NUMBERS = (bool, int, float)
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, Sequence, set, frozenset)
_BYTES = (bytes, bytearray)


class Step:
    """A part of a run, from its beginning to its end: a node, a tool, a hand-over.

    Attributes:
        run: what it is a part of.
        id: its own, for steps below it.
    """

    __slots__ = ("_attributes", "_keep", "_known", "id", "run")

    def __init__(self, run: Run, known: tuple[str, str | None, SpanKind], attributes: JSON, keep: _Keep) -> None:
        self.run = run
        self.id = new_id()
        self._known = (*known, time.time())
        self._attributes: JSON | None = attributes  # until it is over
        self._keep = keep

    def end(self, output: object = None, *, error: BaseException | str | None = None, **attributes: object) -> None:
        """Say that it is over; only the first time counts.

        Args:
            output: what came out.
            error: why it failed.
            attributes: anything else that is known by now.
        """
        begun_with, self._attributes = self._attributes, None
        if begun_with is None:
            return
        known = {**begun_with, **_json_values(output=output, **attributes)}
        name, parent_id, kind, began = self._known
        error = described(error)
        self._keep(SpanInfo(self.id, self.run.id, name, began, parent_id, time.time(), kind, known, error))


class Run:
    """One run of an agent, told by events. Neither raises nor waits; thread-safe."""

    def __init__(
        self,
        name: str | None = None,
        *,
        id: str | None = None,
        session_id: str | None = None,
        user_id: str | None = None,
        tags: Iterable[str] = (),
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Begin a run, or take part in the one that is in force.

        Args:
            name: what kind of run it is.
            id: the framework's own id of it; runs with the same id are one trajectory. A new one unless given.
            session_id: the conversation, thread or session that it is a turn of.
            user_id: for whom.
            tags: labels.
            metadata: anything else, as JSON values, without `replay`: whoever calls the app may have given it.
        """
        here = ambient()
        around = registered_around(here)
        self._group_key = here.group_key
        self._below = here.span_id if around is None else around.step_id
        self._own = False
        if here.open is not None or around is not None:
            self._open = here.open or cast(RegisteredSpan, around).open
        else:
            info = identify(using=False).trajectory
            self._own = info is None
            info = info or TrajectoryInfo(id or new_id(), time.time(), "explicit", group_key=here.group_key)
            info = _named(info, name=name, session_id=session_id, user_id=user_id)
            of_framework = {key: value for key, value in (metadata or {}).items() if key != REPLAY}
            info = replace(info, tags=info.tags or tuple(tags), metadata=info.metadata or _json_values(**of_framework))
            self._open = OpenTrajectory(info)

    @property
    def id(self) -> str:
        """Of the trajectory, which is one of several runs' where the app holds them together."""
        return self._open.info.id

    def step(
        self, name: str, kind: SpanKind = "span", *, parent: Step | None = None, input: object = None, **known: object
    ) -> Step:
        """Begin a part of the run.

        Args:
            name: of the node, tool, agent.
            kind: what it is.
            parent: the step around it; the run itself unless given.
            input: what goes in.
            known: anything else.
        """
        above = self._below if parent is None else parent.id
        return Step(self, (name, above, kind), _json_values(input=input, **known), self._keep)

    def inside(self, step: Step | None = None) -> Inside:
        """Return what puts the run, and a step of it, in force: a context manager, or `enter()` and `leave()`."""
        now = Ambient()
        now.open, now.group_key = self._open, self._group_key
        now.span_id = self._below if step is None else step.id
        return Inside(now)

    def take_span(self, span_id: int, step: Step | None = None) -> None:
        """Say that calls under an OpenTelemetry span, which begins here, are this run's, and a step's."""
        register(span_id, RegisteredSpan(self._open, self._below if step is None else step.id, ambient().span_id))

    @staticmethod
    def drop_span(span_id: int) -> None:
        """Say that a span has ended."""
        forget(span_id)

    def score(self, name: str, value: float, *, comment: str | None = None) -> None:
        """Judge the run by what the framework saw, such as an answer that did not validate (0)."""
        if math.isfinite(value):
            short = None if comment is None else comment[:MOST_CHARS]
            self._keep(Score(new_id(), self.id, name, float(value), "code", time.time(), comment=short))

    def know(self, *, session_id: str | None = None, user_id: str | None = None) -> None:
        """Say what turned out late; it is written when the run ends. What is known already stays."""
        if self._own:
            self._open.info = _named(self._open.info, session_id=session_id, user_id=user_id)

    def end(self, output: object = None, *, error: BaseException | str | None = None) -> None:
        """Say that it is over, and what came out. A run that is part of the app's own goes on."""
        if not self._open.used:
            return
        emit(*self._open.waited())
        if not self._own:
            return
        if output is not None:  # a trajectory has no result of its own; a step that lasted as long as it did has one
            info = self._open.info
            whole = SpanInfo(new_id(), self.id, info.name or "run", info.started_at, self._below, kind="agent")
            emit(replace(whole, ended_at=time.time(), attributes=_json_values(output=output), error=described(error)))
        emit(replace(self._open.info, ended_at=time.time(), error=described(error)))

    def _keep(self, record: SpanInfo | Score) -> None:
        if not self._open.used:  # perhaps a call is still to come
            self._open.waiting.append(record)
            return
        emit(*self._open.waited(), record)


class Inside:
    """A run in force. What one task or thread enters, it leaves."""

    __slots__ = ("_entered", "_now")

    def __init__(self, now: Ambient) -> None:
        self._now = now
        self._entered: Entered | None = None

    def enter(self) -> None:
        """Put it in force, from here on in this context."""
        self._entered = enter(self._now)

    def leave(self) -> None:
        """Restore what was in force before; nothing happens in a context where this is not."""
        entered, self._entered = self._entered, None
        if entered is not None:
            leave(entered)

    def __enter__(self) -> None:
        """Enter."""
        self.enter()

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.leave()


def guarded(place: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorate a callback: what it raises is counted under `place`, told once, and never reaches the app."""

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def callback(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if is_fault(error):
                    raise
                faults.fault(place, error)
                return None

        return callback

    return decorate


def _named(info: TrajectoryInfo, **known: str | None) -> TrajectoryInfo:
    return replace(info, **{name: getattr(info, name) or value for name, value in known.items()})


def _json_values(**values: object) -> JSON:
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: object, depth: int = 0) -> Any:
    """JSON values of no more than so many characters, items and levels; other objects by their text."""
    if isinstance(value, str):
        return value if len(value) <= MOST_CHARS else value[:MOST_CHARS] + "..."
    if value is None or isinstance(value, _NUMBERS):
        return value
    if depth < _DEEPEST and isinstance(value, _MAPPINGS):
        pairs = islice(cast("Mapping[Any, Any]", value).items(), _MOST_ITEMS)
        return {str(key): _plain(each, depth + 1) for key, each in pairs}
    if depth < _DEEPEST and isinstance(value, _SEQUENCES) and not isinstance(value, _BYTES):
        return [_plain(each, depth + 1) for each in islice(cast("Sequence[Any]", value), _MOST_ITEMS)]
    try:
        return _plain(str(value))
    except Exception:
        return type(value).__name__


__all__ = ["Inside", "OwnCall", "Run", "Step", "guarded", "record_call"]
