"""The wrappers on the SDK: thin sync and async shells around `RoutedCall`, and how they are put on and taken off.

Four functions of the SDK's base clients are wrapped, because every chat surface of openai 1, 2 and 3 goes through
them: `request` (one call, retries included) for routing and the record, `_process_response` (the HTTP response before
the SDK parses it) for the bytes. Objects made before the patch are covered, objects that the SDK returns are its own.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Token
from typing import Any, NamedTuple

import wrapt

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, TooSlow
from art_patch.patching.routing.routed_call import PENDING, Attempt, RoutedCall, begin
from art_patch.patching.runtime import Runtime
from art_patch.patching.sdk.first_byte_watch import watch

MODULE = "openai._base_client"

_BELOW_US = ("httpx", "httpx2", "httpcore", "httpcore2", "anyio", "openai")


class _Site(NamedTuple):
    owner: type
    name: str
    original: Any
    wrapper: Any


class Wrapping:
    """The four wrappers. They ask `runtime(client)` on each call and pass through when it says `None`."""

    def __init__(self, runtime: Callable[[Any], Runtime | None]) -> None:
        """Wrap nothing yet; `runtime(client)` says whether, and by what, a client's calls are handled."""
        self._runtime = runtime
        self._sites: list[_Site] = []

    @property
    def on(self) -> bool:
        """Whether the SDK is wrapped."""
        return bool(self._sites)

    def put_on(self, module: Any) -> None:
        """Wrap the SDK's base clients; nothing if they are wrapped already.

        Raises:
            LookupError, AttributeError: if the SDK does not have what we wrap; then nothing was wrapped.
        """
        if self._sites:
            return
        places = (
            (module.SyncAPIClient, "request", self._sync_request),
            (module.SyncAPIClient, "_process_response", _sync_response),
            (module.AsyncAPIClient, "request", self._async_request),
            (module.AsyncAPIClient, "_process_response", _async_response),
        )
        for base, name, make in (places[0], places[2]):
            places += tuple((owner, name, make) for owner in _past(base, name))
        originals = [owner.__dict__[name] for owner, name, _ in places]
        for (owner, name, make), original in zip(places, originals, strict=True):
            wrapper: Any = wrapt.FunctionWrapper(original, make(original))
            setattr(owner, name, wrapper)
            self._sites.append(_Site(owner, name, original, wrapper))

    def take_off(self) -> bool:
        """Restore the original function objects; false if somebody wrapped over us, who then keeps calling through."""
        clean = True
        for site in self._sites:
            if site.owner.__dict__.get(site.name) is site.wrapper:
                setattr(site.owner, site.name, site.original)
            else:
                clean = False
        self._sites = []
        return clean

    def _sync_request(self, original: Any) -> Callable[..., Any]:
        def request(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            options, around = _options(args, kwargs), PENDING.get()
            if around is not None and around.covers(options):
                return wrapped(*args, **kwargs)  # an older wrapper of ours below somebody else's
            routed_call = begin(self._runtime(client), client, options, kwargs.get("stream", False), False)
            if routed_call is None and around is None:
                return wrapped(*args, **kwargs)
            token = PENDING.set(routed_call)
            try:
                if routed_call is None:
                    return wrapped(*args, **kwargs)
                while routed_call.routed and (attempt := routed_call.next_attempt()) is not None:
                    try:
                        attempt_args, attempt_kwargs = _for_engine(attempt, args, kwargs)
                        result = original.__get__(attempt.engine_client)(*attempt_args, **attempt_kwargs)
                    except Exception as error:
                        routed_call.attempt_failed(error)
                    else:
                        routed_call.answered()
                        return result
                try:
                    result = wrapped(*args, **kwargs)
                except Exception as error:
                    attempt, result = routed_call.last_attempt(error), None
                    if attempt is not None:
                        try:
                            attempt_args, attempt_kwargs = _for_engine(attempt, args, kwargs)
                            result = original.__get__(attempt.engine_client)(*attempt_args, **attempt_kwargs)
                        except Exception as no_answer:
                            routed_call.attempt_failed(no_answer)
                    if result is None:
                        raise  # upstream's own error, as it came
                routed_call.answered()
                return result
            except BaseException as error:
                if routed_call is not None:
                    routed_call.failed(error)
                raise
            finally:
                _reset(token)

        return request

    def _async_request(self, original: Any) -> Callable[..., Any]:
        async def request(
            wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            options, around = _options(args, kwargs), PENDING.get()
            if around is not None and around.covers(options):
                return await wrapped(*args, **kwargs)
            routed_call = begin(self._runtime(client), client, options, kwargs.get("stream", False), True)
            if routed_call is None and around is None:
                return await wrapped(*args, **kwargs)
            token = PENDING.set(routed_call)
            try:
                if routed_call is None:
                    return await wrapped(*args, **kwargs)
                while routed_call.routed and (attempt := routed_call.next_attempt()) is not None:
                    try:
                        attempt_args, attempt_kwargs = _for_engine(attempt, args, kwargs)
                        result = await original.__get__(attempt.engine_client)(*attempt_args, **attempt_kwargs)
                    except Exception as error:
                        routed_call.attempt_failed(error)
                    else:
                        routed_call.answered()
                        return result
                try:
                    result = await wrapped(*args, **kwargs)
                except Exception as error:
                    attempt, result = routed_call.last_attempt(error), None
                    if attempt is not None:
                        try:
                            attempt_args, attempt_kwargs = _for_engine(attempt, args, kwargs)
                            result = await original.__get__(attempt.engine_client)(*attempt_args, **attempt_kwargs)
                        except Exception as no_answer:
                            routed_call.attempt_failed(no_answer)
                    if result is None:
                        raise  # upstream's own error, as it came
                routed_call.answered()
                return result
            except BaseException as error:
                if routed_call is not None:
                    routed_call.failed(error)
                raise
            finally:
                _reset(token)

        return request


def _sync_response(_: Any) -> Callable[..., Any]:
    def process(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        routed_call = PENDING.get()
        response = kwargs.get("response")
        if routed_call is None or response is None or not routed_call.claim(client):
            return wrapped(*args, **kwargs)
        attempt = routed_call.attempt
        if attempt is None:
            routed_call.capture(response)
            return wrapped(*args, **kwargs)
        try:
            rewriter = routed_call.rewriter(attempt, response)
            if response.is_closed:
                routed_call.rewrite_whole(rewriter, response)
            else:
                events, before = routed_call.peek(rewriter, response), list[bytes]()
                opened = iter(response.stream)
                with watch.wait_for(response, routed_call.first_token_timeout_s(attempt, response)):
                    while not events.begun and (chunk := next(opened, None)) is not None:
                        before.append(routed_call.read(events, chunk))
                # From here on it may pause, as any stream that has begun.
                while not events.started and (chunk := next(opened, None)) is not None:
                    before.append(routed_call.read(events, chunk))
                routed_call.roll(response, events, opened, before)
        except BaseException as error:
            response.close()
            _not_ours(error)
            raise
        # The objects that the app gets belong to its own client, not to the engine_client.
        return routed_call.client._process_response(**{**kwargs, "options": routed_call.options})

    return process


def _async_response(_: Any) -> Callable[..., Any]:
    async def process(
        wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        routed_call = PENDING.get()
        response = kwargs.get("response")
        if routed_call is None or response is None or not routed_call.claim(client):
            return await wrapped(*args, **kwargs)
        attempt = routed_call.attempt
        if attempt is None:
            routed_call.capture(response)
            return await wrapped(*args, **kwargs)
        try:
            rewriter = routed_call.rewriter(attempt, response)
            if response.is_closed:
                routed_call.rewrite_whole(rewriter, response)
            else:
                events, before = routed_call.peek(rewriter, response), list[bytes]()
                opened = response.stream.__aiter__()
                try:
                    async with _deadline(routed_call.first_token_timeout_s(attempt, response)):
                        while not events.begun and (chunk := await anext(opened, None)) is not None:
                            before.append(routed_call.read(events, chunk))
                except TimeoutError as error:
                    raise TooSlow("the stream did not begin in time") from error
                while not events.started and (chunk := await anext(opened, None)) is not None:
                    before.append(routed_call.read(events, chunk))
                routed_call.roll(response, events, opened, before)
        except BaseException as error:
            await response.aclose()
            _not_ours(error)
            raise
        return await routed_call.client._process_response(**{**kwargs, "options": routed_call.options})

    return process


def _past(base: type, name: str) -> list[type]:
    """Classes below `base` on which another instrumentation has put a wrapper of its own around the base's function.

    It holds the function as it was then, so whatever is put on the base now would never be called. A method that the
    app's own subclass defines is no such thing: it calls the base's.
    """
    unwrapped = base.__dict__[name]
    return [each for each in _below(base) if name in each.__dict__ and inspect.unwrap(each.__dict__[name]) is unwrapped]


def _below(owner: type) -> list[type]:
    return [each for sub in owner.__subclasses__() for each in (sub, *_below(sub))]


def _deadline(seconds: float) -> AbstractAsyncContextManager[object]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # another event loop than asyncio's, which knows no such thing as a timeout of its own
        return _fail_after(seconds)
    return asyncio.timeout(seconds)


@asynccontextmanager
async def _fail_after(seconds: float) -> AsyncGenerator[None]:
    from anyio import fail_after  # the SDK brings it

    with fail_after(seconds):
        yield


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("options")


def _for_engine(
    attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > 1:
        return (args[0], attempt.options, *args[2:]), kwargs
    return args, {**kwargs, "options": attempt.options}


def _not_ours(error: BaseException) -> None:
    """Count `error` unless it is the engine's doing."""
    from_below = type(error).__module__.partition(".")[0] in _BELOW_US
    if isinstance(error, Exception) and not isinstance(error, InvalidAnswer) and not from_below:
        faults.fault("patching.rewriter", error)


def _reset(token: Token[RoutedCall | None]) -> None:
    try:
        PENDING.reset(token)
    except ValueError:
        # A coroutine that was never finished is closed by the garbage collector in whatever context that runs in.
        return
