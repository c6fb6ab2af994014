"""Wraps the SDK's base clients: thin synchronous and asynchronous shells around `RoutedCall`.

Every call of openai 1, 2 and 3 passes two functions, each in a synchronous and an asynchronous class, so four functions
are wrapped. The wrapper of `request` (one call, retries included) decides about routing and recording. The wrapper of
`_process_response` reads the bytes of the HTTP response before the SDK parses them. Clients that were made before the
patch are patched too, and all objects that the app gets are the SDK's own.

The wrappers call `RoutedCall` in this order::

    request               begin                          `None`: the call is passed through untouched
      while it is routed  next_attempt                   `None`: upstream is asked
        the SDK sends the attempt through the engine client
        _process_response claim, rewriter                and then, for an answer that is in memory,
                          rewrite_whole                  or else, for a stream,
                          first_token_timeout_s, read_held_back (for each chunk), hand_out_stream
        it worked         answered                       the end; a stream ends later, in its tap
        it failed         attempt_failed                 the next attempt, or upstream
      the SDK sends the call to upstream
        _process_response claim, capture                 for the response that the SDK accepts
        it worked         answered                       the end
        it failed         last_attempt                   one more attempt, if the engine's answer was empty
    an error that is raised
                          failed                         the end
"""

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
from art_patch.patching.sdk.learn_header import without_learn_header

MODULE = "openai._base_client"

# Errors of these libraries are about the network or the server, and no faults of art_patch.
_BELOW_US = ("httpx", "httpx2", "httpcore", "httpcore2", "anyio", "openai")


class Site(NamedTuple):
    """A method of a class that art_patch has replaced with a wrapper."""

    owner: type
    name: str
    original: Any
    wrapper: Any

    def restore(self) -> bool:
        """Put the original function object back; return false if other code has wrapped our wrapper again."""
        if self.owner.__dict__.get(self.name) is not self.wrapper:
            return False
        setattr(self.owner, self.name, self.original)
        return True


class Wrapping:
    """Replaces the SDK's four functions with wrappers, and restores them."""

    def __init__(self, runtime: Callable[[Any], Runtime | None]) -> None:
        """Wrap nothing yet. Each call asks `runtime(client)`, and passes through untouched if that is `None`."""
        self._runtime = runtime
        self._sites: list[Site] = []

    def put_on(self, module: Any) -> None:
        """Wrap the base clients of the SDK, once; `LookupError` or `AttributeError` if this SDK lacks the functions."""
        if self._sites:
            return
        places = (
            (module.SyncAPIClient, "request", self._sync_request),
            (module.SyncAPIClient, "_process_response", _sync_response),
            (module.AsyncAPIClient, "request", self._async_request),
            (module.AsyncAPIClient, "_process_response", _async_response),
        )
        for base, name, make in (places[0], places[2]):
            places += tuple((owner, name, make) for owner in _already_wrapped_below(base, name))
        # All are looked up before the first is replaced, so that a missing one leaves nothing half wrapped.
        originals = [owner.__dict__[name] for owner, name, _ in places]
        for (owner, name, make), original in zip(places, originals, strict=True):
            wrapper: Any = wrapt.FunctionWrapper(original, make(original))
            setattr(owner, name, wrapper)
            self._sites.append(Site(owner, name, original, wrapper))

    def take_off(self) -> None:
        """Restore the original functions. A wrapper that other code has wrapped again stays, and only calls through."""
        for site in self._sites:
            site.restore()
        self._sites = []

    def _sync_request(self, original: Any) -> Callable[..., Any]:
        def request(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            options, around = _options(args, kwargs), PENDING.get()
            if around is not None and around.covers(options):
                # The same call once more: an older wrapper of ours, below another instrumentation's.
                return wrapped(*args, **kwargs)
            options, args, kwargs, learn = _without_learn_header(client, options, args, kwargs)
            routed_call = begin(self._runtime(client), client, options, kwargs.get("stream", False), False, learn)
            if routed_call is None and around is None:
                return wrapped(*args, **kwargs)
            # Also with `None`: inside another call, the response of this one must not be taken for the other's.
            token = PENDING.set(routed_call)
            try:
                if routed_call is None:
                    return wrapped(*args, **kwargs)
                while routed_call.routed and (attempt := routed_call.next_attempt()) is not None:
                    try:
                        result = _ask(original, attempt, args, kwargs)
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
                            result = _ask(original, attempt, args, kwargs)
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

    # The same with `await`. One body for both would cost a generator or a coroutine in every synchronous call.
    def _async_request(self, original: Any) -> Callable[..., Any]:
        async def request(
            wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            options, around = _options(args, kwargs), PENDING.get()
            if around is not None and around.covers(options):
                return await wrapped(*args, **kwargs)
            options, args, kwargs, learn = _without_learn_header(client, options, args, kwargs)
            routed_call = begin(self._runtime(client), client, options, kwargs.get("stream", False), True, learn)
            if routed_call is None and around is None:
                return await wrapped(*args, **kwargs)
            token = PENDING.set(routed_call)
            try:
                if routed_call is None:
                    return await wrapped(*args, **kwargs)
                while routed_call.routed and (attempt := routed_call.next_attempt()) is not None:
                    try:
                        result = await _ask(original, attempt, args, kwargs)
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
                            result = await _ask(original, attempt, args, kwargs)
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
                events, before = rewriter.stream(), list[bytes]()
                opened = iter(response.stream)
                with watch.wait_for(response, routed_call.first_token_timeout_s(attempt, response)):
                    while not events.begun and (chunk := next(opened, None)) is not None:
                        before.append(routed_call.read_held_back(events, chunk))
                # From here on the stream may pause between chunks for as long as any other.
                while not events.started and (chunk := next(opened, None)) is not None:
                    before.append(routed_call.read_held_back(events, chunk))
                routed_call.hand_out_stream(response, events, opened, before)
        except BaseException as error:
            response.close()
            _not_ours(error)
            raise
        # By the app's own client and not by `wrapped`, so that the objects that the app gets belong to its client.
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
                events, before = rewriter.stream(), list[bytes]()
                opened = response.stream.__aiter__()
                try:
                    async with _deadline(routed_call.first_token_timeout_s(attempt, response)):
                        while not events.begun and (chunk := await anext(opened, None)) is not None:
                            before.append(routed_call.read_held_back(events, chunk))
                except TimeoutError as error:
                    raise TooSlow("the stream did not begin in time") from error
                while not events.started and (chunk := await anext(opened, None)) is not None:
                    before.append(routed_call.read_held_back(events, chunk))
                routed_call.hand_out_stream(response, events, opened, before)
        except BaseException as error:
            await response.aclose()
            _not_ours(error)
            raise
        return await routed_call.client._process_response(**{**kwargs, "options": routed_call.options})

    return process


def _ask(original: Any, attempt: Attempt, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Send an attempt through its engine client. For an asynchronous client, return the coroutine that sends it."""
    args, kwargs = _with_options(attempt.options, args, kwargs)
    return original.__get__(attempt.engine_client)(*args, **kwargs)


def _without_learn_header(
    client: Any, options: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], bool]:
    """Return options and arguments without the header for us, and whether it lets the run be learned from."""
    if (found := without_learn_header(client, options)) is None:
        return options, args, kwargs, True
    options, learn = found
    return options, *_with_options(options, args, kwargs), learn


def _with_options(options: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # The SDK hands the options over by position. openai 1.12 to 1.66 adds the remaining retries after them.
    if len(args) > 1:
        return (args[0], options, *args[2:]), kwargs
    return args, {**kwargs, "options": options}


def _already_wrapped_below(base: type, name: str) -> list[type]:
    """Return the subclasses of `base` where another instrumentation has wrapped a function of `base`.

    Such a wrapper holds the function as it was then, so a wrapper that is put on `base` now would never be called. A
    method that the app's own subclass defines is not affected: it calls the method of `base`.
    """
    unwrapped = base.__dict__[name]
    return [each for each in _below(base) if name in each.__dict__ and inspect.unwrap(each.__dict__[name]) is unwrapped]


def _below(owner: type) -> list[type]:
    return [each for sub in owner.__subclasses__() for each in (sub, *_below(sub))]


def _deadline(seconds: float) -> AbstractAsyncContextManager[object]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _fail_after(seconds)  # trio, or another event loop that knows no `asyncio.timeout`
    return asyncio.timeout(seconds)


@asynccontextmanager
async def _fail_after(seconds: float) -> AsyncGenerator[None]:
    from anyio import fail_after  # installed with the SDK

    with fail_after(seconds):
        yield


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("options")


def _not_ours(error: BaseException) -> None:
    """Count `error` as a fault of art_patch, unless the engine or the network caused it."""
    from_below = type(error).__module__.partition(".")[0] in _BELOW_US
    if isinstance(error, Exception) and not isinstance(error, InvalidAnswer) and not from_below:
        faults.fault("patching.rewriter", error)


def _reset(token: Token[RoutedCall | None]) -> None:
    try:
        PENDING.reset(token)
    except ValueError:
        # The garbage collector closes an unfinished coroutine in another context; nothing is reset there.
        return
