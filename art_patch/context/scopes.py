"""`trajectory()`, `span()`, `group()`, `suppress()` and `bind()`: scopes around the app's code.

Each scope is a context manager and a decorator. As a decorator it gives every call of the function a trajectory (or
span) of its own, also for coroutines and generators. Without `patch()` the scopes can be used, but nothing is recorded.

A decorated generator needs care: between two `yield`s of its body, the consumer's code runs in the same context. So the
scope applies only while the body runs; it is suspended at each `yield`, together with any `span()` that the body has
opened around the `yield`. Without the decorator, a `with trajectory()` block around a `yield` also applies to the
consumer's code; decorate the generator in place of the block.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from opentelemetry import context as otel
from opentelemetry.context.context import Context

from art_patch._lib.ids import new_id
from art_patch.context import ambient
from art_patch.errors import ConfigError
from art_patch.recording import described, emit
from art_patch.types import JSON, REPLAY, SpanInfo, TrajectoryInfo

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Scope(Generic[T]):
    """A context manager and a decorator. `with` gives a `T`. The same thread may enter one scope again, also nested."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments
        # A list, because one object may be entered again before it is left, for example by recursion.
        self._entered: list[tuple[ambient.Entered, T]] = []

    def _open(self) -> tuple[ambient.Ambient, T]:
        raise NotImplementedError

    def _closed(self, opened: T, error: BaseException | None) -> None:
        """Record the end."""

    def _fresh(self) -> Self:
        return type(self)(*self._arguments)

    def __enter__(self) -> T:
        """Begin the scope."""
        now, opened = self._open()
        self._entered.append((ambient.enter(now), opened))
        return opened

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the scope, and record the error if there is one. The error is never swallowed."""
        entered, opened = self._entered.pop()
        ambient.leave(entered)
        self._closed(opened, error)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` such that each of its calls runs in a scope of its own."""
        return carry(function, self._fresh)


class _Trajectory(Scope[TrajectoryInfo]):
    def __init__(self, id: str | None, given: dict[str, Any]) -> None:
        super().__init__(id, given)
        self._id = id
        self._given = given
        self._open_ones: list[ambient.OpenTrajectory] = []

    def _open(self) -> tuple[ambient.Ambient, TrajectoryInfo]:
        here = ambient.surroundings()
        info = TrajectoryInfo(self._id or new_id(), time.time(), "explicit", group_key=here.group_key, **self._given)
        opened = ambient.OpenTrajectory(info)
        self._open_ones.append(opened)
        now = here.copy()
        # A trajectory begins without a span: those around it belong to another trajectory.
        now.open, now.span_id = opened, None
        return now, info

    def _closed(self, opened: TrajectoryInfo, error: BaseException | None) -> None:
        run = self._open_ones.pop()
        if run.used:
            emit(*run.waited(), replace(opened, ended_at=time.time(), error=described(error)))


class _Span(Scope[str]):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._name = name
        self._spans: list[tuple[ambient.OpenTrajectory | None, SpanInfo, bool]] = []

    def _open(self) -> tuple[ambient.Ambient, str]:
        here, now = ambient.surroundings(), time.time()
        around = ambient.registered_around(here)
        opened = here.open if around is None else around.open
        info = None if opened is None else opened.info
        if info is None:
            info = ambient.identify(using=False).trajectory
        # Outside of everything, this span is the trajectory, and its end is the trajectory's end.
        roots = info is None
        if info is None:
            info = TrajectoryInfo(new_id(), now, "explicit", name=self._name, group_key=here.group_key)
            opened = ambient.OpenTrajectory(info)
        parent_id = here.span_id if around is None else around.step_id
        part = SpanInfo(new_id(), info.id, self._name, now, parent_id=parent_id)
        self._spans.append((opened, part, roots))
        inside = here.copy()
        inside.open, inside.span_id = opened, part.id
        return inside, part.id

    def _closed(self, opened: str, error: BaseException | None) -> None:
        run, part, roots = self._spans.pop()
        if run is not None and not run.used:
            return  # a trajectory without a call leaves no row, and neither does its span
        ended_at = time.time()
        emit(replace(part, ended_at=ended_at))
        if roots and run is not None:
            emit(*run.waited(), replace(run.info, ended_at=ended_at, error=described(error)))


class _Marked(Scope[None]):
    """Changes one attribute of the surroundings."""

    def __init__(self, attribute: str, value: str | bool) -> None:
        super().__init__(attribute, value)
        self._attribute = attribute
        self._value = value

    def _open(self) -> tuple[ambient.Ambient, None]:
        now = ambient.surroundings().copy()
        setattr(now, self._attribute, self._value)
        return now, None


def trajectory(
    name: str | None = None,
    *,
    id: str | None = None,
    scenario: str | None = None,
    session_id: str | None = None,
    user_id: str | None = None,
    tags: Sequence[str] = (),
    metadata: JSON | None = None,
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
    return _Trajectory(id, given)


def noted_run(name: str, noted: JSON) -> Scope[TrajectoryInfo]:
    """Return a `trajectory()` scope whose metadata holds the target and arguments that `replayable()` noted."""
    return _Trajectory(None, {"name": name, "metadata": noted})


def span(name: str) -> Scope[str]:
    """Mark a named part of the trajectory, nested in the surrounding span. `with ... as` gives the id of the span.

    Outside of every trajectory and OpenTelemetry trace, the outermost span also is a new trajectory.
    """
    return _Span(name)


def group(key: str) -> Scope[None]:
    """Make the trajectories that start inside siblings: runs of one task that are compared with each other.

    Blocks with the same `key` are one group.

    Raises:
        ConfigError: if `key` is empty.
    """
    if not key:
        raise ConfigError("group(key) must not be empty; give the task's own key, such as its ticket number")
    return _Marked("group_key", key)


def suppress() -> Scope[None]:
    """Make calls inside go upstream without being recorded or routed: for evaluations, judges and health checks."""
    return _Marked("suppressed", True)


class _Captured:
    """Puts a context that was captured elsewhere in force."""

    def __init__(self, inside: Context) -> None:
        self._inside = inside
        self._before: Context | None = None

    def __enter__(self) -> None:
        self._before = otel.get_current()
        otel.attach(self._inside)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            otel.attach(self._before)


def bind(function: Callable[P, R]) -> Callable[P, R]:
    """Return a wrapper of `function` that runs in the OpenTelemetry context in which `bind` was called.

    That context holds trajectory, span and group. After `patch()`, threads and thread pools inherit these from the code
    that starts them, but only until its `with` block ends. A bound function keeps them after that, in whatever thread
    or task it is called. Use it for the generator of a streamed answer, or for work in the background::

        return StreamingResponse(art.bind(answer)(question))
    """
    # Taken now and not when the function is called: the block may have ended by then.
    inside = ambient.lasting()
    return carry(function, lambda: _Captured(inside))


OpenScope = Callable[[], AbstractContextManager[object]]


def carry(function: Callable[P, R], open_scope: OpenScope) -> Callable[P, R]:
    """Return a wrapper of `function`: each call of it runs inside a new scope, which `open_scope()` makes."""
    inner = cast(Callable[..., Any], function)

    def plain(*args: Any, **kwargs: Any) -> Any:
        with open_scope():
            return inner(*args, **kwargs)

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with open_scope():
            return await inner(*args, **kwargs)

    def generator(*args: Any, **kwargs: Any) -> Any:
        return _drive(inner, args, kwargs, open_scope)

    def async_generator(*args: Any, **kwargs: Any) -> Any:
        return _drive_async(inner, args, kwargs, open_scope)

    if inspect.isasyncgenfunction(function):
        run: Callable[..., Any] = async_generator
    elif inspect.iscoroutinefunction(function):
        run = coroutine
    elif inspect.isgeneratorfunction(function):
        run = generator
    else:
        run = plain
    return cast(Callable[P, R], functools.wraps(function)(run))


class _Stage:
    """Holds the context of a generator's body, which is in force only while the body runs."""

    def __init__(self) -> None:
        self._inside = otel.get_current()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        outside = otel.get_current()
        otel.attach(self._inside)
        try:
            return step(*args)
        finally:
            self._inside = otel.get_current()
            otel.attach(outside)

    async def run_async(self, step: Callable[[], Awaitable[Any]]) -> Any:
        outside = otel.get_current()
        otel.attach(self._inside)
        try:
            return await step()
        finally:
            self._inside = otel.get_current()
            otel.attach(outside)


def _drive(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], open_scope: OpenScope
) -> Generator[Any, Any, Any]:
    stage, scope = _Stage(), open_scope()
    stage.run(scope.__enter__)
    try:
        body = function(*args, **kwargs)
        # `send`, `throw` and `close` of the consumer are passed to the body, as `yield from` would do; but that runs
        # the body in the consumer's context.
        step: Callable[[], Any] = functools.partial(next, body)
        while True:
            try:
                item = stage.run(step)
            except StopIteration as stop:
                result = stop.value
                break
            try:
                sent = yield item
            except GeneratorExit:
                # The consumer has closed the generator. Its body is closed inside the scope, where its `finally` blocks
                # belong.
                stage.run(body.close)
                raise
            except BaseException as error:
                step = functools.partial(body.throw, error)
            else:
                step = functools.partial(body.send, sent)
    except BaseException as error:
        stage.run(scope.__exit__, type(error), error, error.__traceback__)
        raise
    stage.run(scope.__exit__, None, None, None)
    return result


async def _drive_async(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], open_scope: OpenScope
) -> AsyncGenerator[Any, Any]:
    stage, scope = _Stage(), open_scope()
    stage.run(scope.__enter__)
    try:
        body = function(*args, **kwargs)
        step: Callable[[], Awaitable[Any]] = body.__anext__
        while True:
            try:
                item = await stage.run_async(step)
            except StopAsyncIteration:
                break
            try:
                sent = yield item
            except GeneratorExit:
                await stage.run_async(body.aclose)
                raise
            except BaseException as error:
                step = functools.partial(body.athrow, error)
            else:
                step = functools.partial(body.asend, sent)
    except BaseException as error:
        stage.run(scope.__exit__, type(error), error, error.__traceback__)
        raise
    stage.run(scope.__exit__, None, None, None)
