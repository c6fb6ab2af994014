"""The interface for integrations: the events that an agent framework reports to callbacks become a trajectory's steps.

::

    from art_patch.context.integration import Run, guarded

`with trajectory()` must surround the agent's code. A framework's callback cannot do that: it is only told, in some task
or thread, that a node or tool began, and later that it ended. So the integration keeps a `Run` object; each step names
its parent step, and `inside()` makes the SDK's calls inside its block belong to a step. `record_call` records calls of
libraries that bypass the OpenAI SDK, which are never routed. `integrations/README.md` has an integration of 40 lines.

- If the app has a `trajectory()`, a `span()` or an OpenTelemetry trace of its own, the framework's run becomes part of
  that trajectory, and its steps become children of the span that is active. If not, the run is a new trajectory.
- For a framework that emits OpenTelemetry spans, the integration calls `take_span()` at the start of each span, to say
  which step the span belongs to. Calls inside such a span then find their step without `inside()`.
- A run under which no call was recorded leaves no row in the store; nor do its steps and scores.
- Inputs and outputs of steps are kept as JSON values, with texts cut to 4,096 characters. People and judges read them.
  The full text that the model received is in the messages of the calls.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ParamSpec, TypeVar, cast

from art_patch._lib.faults import faults, is_fault
from art_patch._lib.ids import new_id
from art_patch.context import ambient
from art_patch.recording import Exchange, begin_exchange, described, emit
from art_patch.types import JSON, REPLAY, Api, Score, SpanInfo, SpanKind, TrajectoryInfo

P = ParamSpec("P")
R = TypeVar("R")

MOST_CHARS = 4096
# Limits of one step: items of a list or object, and levels of nesting.
_MOST_ITEMS = 64
_DEEPEST = 6
# Checked for every value: a tuple is checked three times as fast as a union, and its first entry before the rest.
_NUMBERS = (bool, int, float)
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, Sequence, set, frozenset)
_BYTES = (bytes, bytearray)


class Step:
    """A part of a run: a node, a tool call, a handoff to another agent. Its child steps name its `id` as parent."""

    __slots__ = ("_attributes", "_known", "id", "run")

    def __init__(self, run: "Run", known: tuple[str, str | None, SpanKind], attributes: JSON) -> None:
        self.run = run
        self.id = new_id()
        self._known = (*known, time.time())
        self._attributes: JSON | None = attributes  # `None` once the step has ended

    def end(self, output: object = None, *, error: BaseException | str | None = None, **attributes: object) -> None:
        """Report that the step has ended, with further `attributes` of its span. Only the first report counts."""
        begun_with, self._attributes = self._attributes, None
        if begun_with is None:
            return
        known = {**begun_with, **_json_values(output=output, **attributes)}
        name, parent_id, kind, began = self._known
        said = described(error)
        self.run.keep(SpanInfo(self.id, self.run.id, name, began, parent_id, time.time(), kind, known, said))


class Run:
    """A run of an agent whose events a framework reports. Its methods never raise, never block, and are thread-safe."""

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
        """Begin a run, as a new trajectory or as part of the one that surrounds the running code.

        Args:
            name: kind of the run, such as the name of the agent.
            id: the framework's own id. Runs with the same id are one trajectory. Without it, a new id is made.
            session_id: the conversation, thread or session that the run is a turn of.
            tags: labels by which commands can select runs.
            metadata: further JSON values. The key `replay` names code to execute and is removed: a user may send it.
        """
        here = ambient.surroundings()
        around = ambient.registered_around(here)
        self._group_key, self._learn = here.group_key, here.learn
        # The steps of the run hang below the app's own step that is in force now.
        self._below = here.span_id if around is None else around.step_id
        self._own = False
        if here.open is not None or around is not None:
            self._open = here.open or cast("ambient.RegisteredSpan", around).open
        else:
            # A trace of the app's own tracing is the run, and the app ends it; a run made here is ended here.
            info = ambient.identify(using=False).trajectory
            self._own = info is None
            info = info or TrajectoryInfo(
                id or new_id(), time.time(), "explicit", group_key=here.group_key, learn=here.learn
            )
            info = _named(info, name=name, session_id=session_id, user_id=user_id)
            of_framework = {key: value for key, value in (metadata or {}).items() if key != REPLAY}
            info = replace(info, tags=info.tags or tuple(tags), metadata=info.metadata or _json_values(**of_framework))
            self._open = ambient.OpenTrajectory(info)

    @property
    def id(self) -> str:
        """Id of the trajectory. Several runs share it if the app has one `trajectory()` or trace around them."""
        return self._open.info.id

    def step(
        self, name: str, kind: SpanKind = "span", *, parent: Step | None = None, input: object = None, **known: object
    ) -> Step:
        """Begin a step (node, tool, agent) below `parent` or at top level; `known` are attributes of its span."""
        return Step(self, (name, self._id_of(parent), kind), _json_values(input=input, **known))

    def inside(self, step: Step | None = None) -> "Inside":
        """Return a context manager, also with `enter()` and `leave()`, whose calls belong to the run, or to `step`."""
        now = ambient.Ambient()
        now.open, now.group_key, now.span_id = self._open, self._group_key, self._id_of(step)
        # Also where the framework calls from a thread of its own.
        now.learn = self._learn and ambient.surroundings().learn
        return Inside(now)

    def take_span(self, span_id: int, step: Step | None = None) -> None:
        """Register an OpenTelemetry span that begins now, so that calls inside it belong to this run, and to `step`."""
        here = ambient.surroundings()
        learn = self._learn and here.learn
        ambient.register(span_id, ambient.RegisteredSpan(self._open, self._id_of(step), here.span_id, learn))

    # Called with the id of a span that `take_span` has registered, when that span has ended.
    drop_span = staticmethod(ambient.forget)

    def score(self, name: str, value: float, *, comment: str | None = None) -> None:
        """Store a score by the framework, such as 0 for a failed schema validation; NaN and infinity are ignored."""
        # Not `score()`, which raises: a framework's odd value must not reach the app as an error.
        if math.isfinite(value):
            short = None if comment is None else comment[:MOST_CHARS]
            self.keep(Score(new_id(), self.id, name, float(value), "code", time.time(), comment=short))

    def know(self, *, session_id: str | None = None, user_id: str | None = None) -> None:
        """Add ids that the framework reports later; ids that are set stay, as do those of the app's own trajectory."""
        if self._own:
            self._open.info = _named(self._open.info, session_id=session_id, user_id=user_id)

    def end(self, output: object = None, *, error: BaseException | str | None = None) -> None:
        """Report that the run has ended, with its output or error.

        If the run is part of the app's own trajectory, that one continues, and `output` and `error` are not stored.
        """
        if not self._open.used:
            return
        emit(*self._open.waited())
        if not self._own:
            return
        if output is not None:  # a trajectory has no output, so a step of the same length gets it
            info = self._open.info
            whole = SpanInfo(new_id(), self.id, info.name or "run", info.started_at, self._below, kind="agent")
            emit(replace(whole, ended_at=time.time(), attributes=_json_values(output=output), error=described(error)))
        emit(replace(self._open.info, ended_at=time.time(), error=described(error)))

    def _id_of(self, step: Step | None) -> str | None:
        return self._below if step is None else step.id

    def keep(self, record: SpanInfo | Score) -> None:
        """Store a step that has ended, or a score."""
        if self._open.used:
            emit(*self._open.waited(), record)
        else:  # the run is stored once it has a call, and then with this record
            self._open.waiting.append(record)


class Inside:
    """Makes the calls of the SDK belong to a run, from `enter()` to `leave()`, which the same task or thread calls."""

    __slots__ = ("_entered", "_now")

    def __init__(self, now: ambient.Ambient) -> None:
        self._now = now
        self._entered: ambient.Entered | None = None

    def enter(self) -> None:
        """Make the calls that follow in this task or thread belong to the run."""
        self._entered = ambient.enter(self._now)

    def leave(self) -> None:
        """Restore the surroundings from before `enter()`. In a task or thread that did not enter, nothing changes."""
        entered, self._entered = self._entered, None
        if entered is not None:
            ambient.leave(entered)

    __enter__ = enter

    def __exit__(self, *_: object) -> None:
        """Restore the surroundings from before the block."""
        self.leave()


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
        """
        if answer is not None and not self._exchange.is_finished:
            self._exchange.saw(answer.encode() if isinstance(answer, str) else answer)
        ended = "failed" if error is not None else "closed" if answer is None else "complete"
        self._exchange.finish(ended, described(error))


def record_call(body: Mapping[str, Any], *, api: Api = "chat") -> OwnCall | None:
    """Begin the record of a call that a library is about to send without the OpenAI SDK.

    `body` is the request as OpenAI's JSON. The result is `None` if the running code sends no such call, or if the call
    is not to be recorded (mode `off`, `suppress()`, the app's `match`).
    """
    passage = ambient.passage_around()
    # Outside of a passage the patch sees the call itself, and it would be recorded twice.
    if passage is None or (who := ambient.identify(call=True)).suppressed:
        return None
    exchange = begin_exchange(body, who.trajectory, who.span_id, who.group_key, who.otel_context)
    if exchange is None:
        return None
    exchange.api, exchange.learn = api, exchange.learn and who.learn
    exchange.request = json.dumps(body, default=repr).encode()
    passage.recorded = True
    return OwnCall(exchange)


def guarded(place: str) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorate a callback so that its exceptions are counted under `place` and logged, and raised only under pytest."""

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
    """Return a JSON value with a limited number of characters, items and levels. Other objects become their text."""
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
