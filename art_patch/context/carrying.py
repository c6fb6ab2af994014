"""Running functions of every kind inside a scope: plain, async, generators, async generators.

A generator is the hard case: the scope belongs to its body, yet the body runs in slices, in its consumer's frame. So
the scope is switched on for each slice and off before the value is handed out. What the body itself has entered (a
`span()` around a `yield`) is switched along with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

from opentelemetry import context as otel

P = ParamSpec("P")
R = TypeVar("R")

OpenScope = Callable[[], AbstractContextManager[object]]


def carry(function: Callable[P, R], open_scope: OpenScope) -> Callable[P, R]:
    """Return `function` such that each call runs inside its own `open_scope()`."""
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
    """The context of a generator's body, in force only while the body runs."""

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
