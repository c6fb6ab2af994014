"""`trajectory()`, `span()`, `group()`, `suppress()` and `bind()`: scopes around the app's code.

Each scope is a context manager and a decorator. As a decorator it gives every call of the function a trajectory (or
span) of its own, also for coroutines and generators. Without `patch()` the scopes can be used, but nothing is recorded.

A decorated generator needs care: between two `yield`s of its body, the consumer's code runs in the same context. So the
scope applies only while the body runs; it is suspended at each `yield`, together with any `span()` that the body has
opened around the `yield`. Without the decorator, a `with trajectory()` block around a `yield` also applies to the
consumer's code; decorate the generator in place of the block.
"""

import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, cast

from opentelemetry import context as otel

from art_patch._lib.ids import new_id
from art_patch.context import ambient
from art_patch.errors import ConfigError
from art_patch.recording import described, emit
from art_patch.types import JSON, REPLAY, SpanInfo, TrajectoryInfo

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


_End: TypeAlias = Callable[[BaseException | None], None]
Begun: TypeAlias = tuple[ambient.Ambient, T, _End]


class Scope(Generic[T]):
    """A context manager and a decorator. `with` gives a `T`. A thread may enter one scope again, also by recursion."""

    def __init__(self, begin: Callable[[], Begun[T]]) -> None:
        """`begin()` returns the surroundings inside, the value for the app, and a function to call at the end."""
        self._begin = begin
        self._entered: list[tuple[ambient.Entered, _End]] = []

    def __enter__(self) -> T:
        """Begin the scope."""
        now, given, end = self._begin()
        self._entered.append((ambient.enter(now), end))
        return given

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """End the scope, and record the error if there is one. The error is never swallowed."""
        entered, end = self._entered.pop()
        ambient.leave(entered)
        end(error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` such that each of its calls runs in a scope of its own."""
        return carry(function, lambda args, kwargs: Scope(self._begin))


def _begin_trajectory(id: str | None, learn: bool, given: dict[str, Any]) -> Begun[TrajectoryInfo]:
    now = ambient.surroundings().copy()
    now.learn = now.learn and learn
    key = id or new_id()
    info = TrajectoryInfo(key, time.time(), "explicit", group_key=now.group_key, learn=now.learn, **given)
    run = ambient.OpenTrajectory(info)
    # A trajectory begins without a span: those around it belong to another trajectory.
    now.open, now.span_id = run, None

    def end(error: BaseException | None) -> None:
        if run.used:
            emit(*run.waited(), replace(info, ended_at=time.time(), error=described(error)))

    return now, info, end


def _begin_span(name: str, learn: bool) -> Begun[str]:
    here, began_at = ambient.surroundings(), time.time()
    around = ambient.registered_around(here)
    run = here.open if around is None else around.open
    info = ambient.identify(using=False).trajectory if run is None else run.info
    # Outside of everything, this span is the trajectory, and its end is the trajectory's end.
    roots = info is None
    if info is None:
        info = TrajectoryInfo(
            new_id(), began_at, "explicit", name=name, group_key=here.group_key, learn=here.learn and learn
        )
        run = ambient.OpenTrajectory(info)
    parent_id = here.span_id if around is None else around.step_id
    part = SpanInfo(new_id(), info.id, name, began_at, parent_id=parent_id)
    now = here.copy()
    now.open, now.span_id, now.learn = run, part.id, here.learn and learn

    def end(error: BaseException | None) -> None:
        if run is not None and not run.used:
            return  # a trajectory without a call leaves no row, and neither does its span
        ended_at = time.time()
        emit(replace(part, ended_at=ended_at))
        if roots and run is not None:
            emit(*run.waited(), replace(run.info, ended_at=ended_at, error=described(error)))

    return now, part.id, end


def _begin_marked(attribute: str, value: str | bool) -> Begun[None]:
    now = ambient.surroundings().copy()
    setattr(now, attribute, value)
    return now, None, lambda _: None


def trajectory(
    name: str | None = None,
    *,
    id: str | None = None,
    scenario: str | None = None,
    session_id: str | None = None,
    user_id: str | None = None,
    tags: Sequence[str] = (),
    metadata: JSON | None = None,
    learn: bool = True,
) -> Scope[TrajectoryInfo]:
    """Mark all calls inside as one run of the agent on one task. `with ... as` gives the trajectory, with its `id`.

    Args:
        name: kind of the run, such as the name of the agent.
        id: an id of your own; blocks with the same id are one trajectory. Without it, a new id is made.
        scenario: key of the task. Trajectories with the same key are compared with each other.
        session_id: id of the user's session. A canary test assigns whole sessions to the champion or the canary.
        user_id: id of the user. `art-patch erase --user` deletes all trajectories with this id.
        tags: labels by which commands can select runs.
        metadata: further JSON values. The key `replay` is removed, because only `replayable()` may name code to run.
        learn: whether the run may be judged, asked again, used by the gate and trained on. Anything but `True` forbids
            it, also to blocks inside; then the run is recorded for operation only.

    Raises:
        ConfigError: if `id` is empty.
    """
    if id is not None and not id:
        raise ConfigError("trajectory(id=...) must not be empty; leave it out to get a new id")
    given: dict[str, Any] = {
        "name": name,
        "scenario_key": scenario,
        "session_id": session_id,
        "user_id": user_id,
        # A single label in place of a list is an easy mistake, and its letters would become tags.
        "tags": (tags,) if isinstance(tags, str) else tuple(tags),
        "metadata": {key: value for key, value in (metadata or {}).items() if key != REPLAY},
    }
    return Scope(partial(_begin_trajectory, id, learn is True, given))


def noted_run(name: str, noted: JSON) -> Scope[TrajectoryInfo]:
    """Return a `trajectory()` scope whose metadata holds the target and arguments that `replayable()` noted."""
    return Scope(partial(_begin_trajectory, None, True, {"name": name, "metadata": noted}))


def span(name: str, *, learn: bool = True) -> Scope[str]:
    """Mark a named part of the trajectory, nested in the surrounding span. `with ... as` gives the id of the span.

    Outside of every trajectory and OpenTelemetry trace, the outermost span also is a new trajectory. If `learn` is not
    `True`, a call inside keeps its whole run from being learned from, as in `trajectory()`.
    """
    return Scope(partial(_begin_span, name, learn is True))


def group(key: str) -> Scope[None]:
    """Make the trajectories that start inside siblings: runs of one task that are compared with each other.

    Blocks with the same `key` are one group; an empty key raises a `ConfigError`.
    """
    if not key:
        raise ConfigError("group(key) must not be empty; give the task's own key, such as its ticket number")
    return Scope(partial(_begin_marked, "group_key", key))


def recorded_only() -> Scope[None]:
    """Make runs with calls inside be recorded for operation only, as with `trajectory(learn=False)`."""
    return Scope(partial(_begin_marked, "learn", False))


def suppress() -> Scope[None]:
    """Make calls inside go upstream without being recorded or routed: for evaluations, judges and health checks."""
    return Scope(partial(_begin_marked, "suppressed", True))


class _Stage:
    """Puts a context in force that was captured elsewhere, and keeps what the block makes of it for the next block."""

    def __init__(self, inside: otel.Context) -> None:
        self._inside = inside

    def __enter__(self) -> None:
        self._outside = otel.get_current()
        otel.attach(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = otel.get_current()
        otel.attach(self._outside)


def bind(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of `function` that runs in the OpenTelemetry context in which `bind` was called.

    That context holds trajectory, span and group. After `patch()`, threads and thread pools inherit these from the code
    that starts them, but only until its `with` block ends. A bound function keeps them after that, in whatever thread
    or task it is called. Use it for the generator of a streamed answer, or for work in the background::

        return StreamingResponse(art.bind(answer)(question))
    """
    # Taken now and not when the function is called: the block may have ended by then.
    inside = ambient.lasting()
    return carry(function, lambda args, kwargs: _Stage(inside))


Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
OpenScope: TypeAlias = Callable[[Args, Kwargs], AbstractContextManager[object]]


def carry(function: Callable[P, R], open_scope: OpenScope) -> Callable[P, R]:
    """Return a wrapper of `function`: each call runs inside a scope of its own, `open_scope(args, kwargs)`."""
    inner = cast("Callable[..., Any]", function)

    def plain(*args: Any, **kwargs: Any) -> Any:
        with open_scope(args, kwargs):
            return inner(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with open_scope(args, kwargs):
            return await inner(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        return _drive(inner, args, kwargs, open_scope(args, kwargs))

    def async_generator(*args: Any, **kwargs: Any) -> Any:
        return _drive_async(inner, args, kwargs, open_scope(args, kwargs))

    run: Callable[..., Any] = plain
    if inspect.isasyncgenfunction(function):
        run = async_generator
    elif inspect.iscoroutinefunction(function):
        run = coroutine
    elif inspect.isgeneratorfunction(function):
        run = generator
    return cast("Callable[P, R]", wraps(function)(run))


class _Staged:
    """Enters and leaves the scope of a generator's body; `with ... as` gives the stage that the body runs on."""

    def __init__(self, scope: AbstractContextManager[object]) -> None:
        self._stage, self._scope = _Stage(otel.get_current()), scope

    def __enter__(self) -> _Stage:
        with self._stage:
            self._scope.__enter__()
        return self._stage

    def __exit__(self, *error: Any) -> None:
        with self._stage:
            self._scope.__exit__(*error)


# Passes `send`, `throw` and `close` to the body as `yield from` does, but not in the consumer's context.
def _drive(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, scope: AbstractContextManager[object]
) -> Generator[Any, Any, Any]:
    with _Staged(scope) as stage:
        body = function(*args, **kwargs)
        step: Callable[[], Any] = partial(next, body)
        while True:
            try:
                with stage:
                    item = step()
            except StopIteration as stop:
                return stop.value
            try:
                sent = yield item
            except GeneratorExit:
                # The consumer has closed the generator. The scope covers the body's `finally` blocks, too.
                with stage:
                    body.close()
                raise
            except BaseException as error:
                step = partial(body.throw, error)
            else:
                step = partial(body.send, sent)


async def _drive_async(
    function: Callable[..., Any], args: Args, kwargs: Kwargs, scope: AbstractContextManager[object]
) -> AsyncGenerator[Any, Any]:
    with _Staged(scope) as stage:
        body = function(*args, **kwargs)
        step: Callable[[], Awaitable[Any]] = body.__anext__
        while True:
            try:
                with stage:
                    item = await step()
            except StopAsyncIteration:
                return
            try:
                sent = yield item
            except GeneratorExit:
                with stage:
                    await body.aclose()
                raise
            except BaseException as error:
                step = partial(body.athrow, error)
            else:
                step = partial(body.asend, sent)
