"""Records a stream below the SDK while the app reads it, and rewrites it if it comes from the engine.

A tee replaces `response.stream`, so every object that the app holds is the SDK's own. The exchange of the call ends
once, at the first of these events: the end of the stream, an error, `close()`, or the garbage collection of the stream,
even if the app never iterated it. Only the first iteration is recorded (openai 3 iterates again after `[DONE]`).

If the engine's stream breaks in the middle, the app gets the SDK's own `APIConnectionError`. The call does not go
upstream then: the app has received half of an answer, and the rest of another model's answer would not continue it.
"""

import _thread
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Self, TypeAlias, cast

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, StreamRewriter
from art_patch.recording import Ended, Exchange

_MOST_BYTES = 16 << 20  # of a recorded stream, unpacked
_PIECE_BYTES = 64  # unpacked at once; brotli makes up to 16 MiB of about ten bytes
_POOLS = ("httpcore.", "httpcore2.")

# What each `_SyncTappedIterator` reads from, by its id. The reference keeps the garbage collector from finalising that
# stream before the iterator, wherever the collector runs.
_read_from: dict[int, Any] = {}


_OnBroken: TypeAlias = Callable[[], None] | None


class StreamTap:
    """The state of one recorded stream; `rewriter` rewrites the engine's bytes for the app, `None` leaves them."""

    __slots__ = ("_on_broken", "exchange", "request", "rewriter")

    def __init__(
        self, exchange: Exchange, request: Any, rewriter: StreamRewriter | None = None, on_broken: _OnBroken = None
    ) -> None:
        self.exchange, self.request = exchange, request
        self.rewriter, self._on_broken = rewriter, on_broken

    def turn(self, chunk: bytes) -> bytes:
        """Record `chunk`, and return the bytes for the app; empty if a line of the stream is not complete yet."""
        try:
            self.exchange.saw(chunk)
        except Exception as error:
            faults.fault("patching.tee", error)
        if self.rewriter is None:
            return chunk
        try:
            return self.rewriter.feed(chunk)
        except InvalidAnswer as error:
            self.broke(error)
            raise
        except Exception as error:
            unread, self.rewriter = self.rewriter.unread, None
            faults.fault("patching.strip", error)
            return unread  # as the engine wrote it: the app gets more than it asked for, but nothing is lost

    def end(self) -> bytes:
        """Return the bytes that the app has not received at the end of the stream, and end the exchange."""
        rest = b""
        if self.rewriter is not None:
            try:
                rest = self.rewriter.end()
            except InvalidAnswer as error:
                self.broke(error)
                raise
            except Exception as error:
                faults.fault("patching.strip", error)
        self._finish("complete")
        return rest

    def broke(self, error: BaseException) -> None:
        """End the exchange because of `error`; raise what the app gets in its place if the engine's stream broke."""
        if not isinstance(error, Exception):
            # `GeneratorExit` means that the reader stopped; everything else that is no `Exception` is a cancellation.
            return self._finish("closed" if isinstance(error, GeneratorExit) else "cancelled")
        self._finish("failed", f"{type(error).__name__}: {error}")
        if self.rewriter is None:
            return None
        from openai import APIConnectionError, APITimeoutError

        if self._on_broken is not None:
            self._on_broken()
        # By name, because the class is httpx's or httpx2's.
        if "Timeout" in type(error).__name__:
            raise APITimeoutError(request=self.request) from error
        raise APIConnectionError(message=f"The stream broke: {error}", request=self.request) from error

    def close(self) -> None:
        """End the exchange of a stream that the app does not read any further."""
        if not self.exchange.is_finished:  # it is finished when the stream was read to its end
            self._finish("cancelled" if _task_is_being_cancelled() else "closed")

    def _finish(self, ended: Ended, error: str | None = None) -> None:
        try:
            self.exchange.finish(ended, error)
        except Exception as fault:
            faults.fault("patching.tee", fault)


# A class and not a generator: a generator has a frame, which the event loop would finalise in some other task.
class _TappedIterator:
    """One pass over the stream."""

    __slots__ = ("_after", "_before", "_inner", "_tap")

    def __init__(self, tap: StreamTap, inner: Any, before: bytes) -> None:
        self._tap, self._inner, self._before, self._after = tap, inner, before, False

    def __del__(self) -> None:
        self._tap.close()


class _SyncTappedIterator(_TappedIterator):
    __slots__ = ()

    def __init__(self, tap: StreamTap, inner: Any, before: bytes) -> None:
        super().__init__(tap, inner, before)
        _read_from[id(self)] = inner

    def __del__(self) -> None:
        super().__del__()
        inner = _read_from.pop(id(self), None)
        if not self._after and hasattr(inner, "close") and _within_the_pool():
            _close_elsewhere(inner)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        if self._before:
            out, self._before = self._before, b""
            return out
        while not self._after:
            try:
                chunk = next(self._inner)
            except StopIteration:
                self._after = True
                out = self._tap.end()
            except BaseException as error:
                self._tap.broke(error)
                raise
            else:
                out = self._tap.turn(chunk)
            if out:
                return out
        raise StopIteration


class _AsyncTappedIterator(_TappedIterator):
    __slots__ = ()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._before:
            out, self._before = self._before, b""
            return out
        while not self._after:
            try:
                chunk = await self._inner.__anext__()
            except StopAsyncIteration:
                self._after = True
                out = self._tap.end()
            except BaseException as error:
                self._tap.broke(error)
                raise
            else:
                out = self._tap.turn(chunk)
            if out:
                return out
        raise StopAsyncIteration


class _Tee:
    """Stands in for `response.stream`. A subclass is made for each HTTP library, because the library checks the type.

    Of the stream `inner`, `opened` is the iterator if some of it was read, and `before` is what was read.
    """

    def __init__(self, tap: StreamTap, inner: Any, opened: Any, before: bytes) -> None:
        self._tap, self._inner, self._opened, self._before = tap, inner, opened, before
        self._fresh = True

    def _first_pass(self) -> bool:
        fresh, self._fresh = self._fresh, False
        return fresh

    def __del__(self) -> None:
        # While an iterator runs, it ends the exchange: the SDK may drop the response before the iterator.
        if self._fresh:
            self._tap.close()


class _SyncTee(_Tee):
    def __iter__(self) -> Iterator[bytes]:
        if not self._first_pass():
            return iter(self._inner)
        inner, self._opened = self._opened or iter(self._inner), None
        return _SyncTappedIterator(self._tap, inner, self._before)

    def close(self) -> None:
        try:
            if _within_the_pool():
                _close_elsewhere(self._inner)
            else:
                self._inner.close()
        finally:
            self._tap.close()


def _within_the_pool() -> bool:
    """Return whether this code runs inside a connection pool, where the garbage collector may close a stream."""
    # The pool's lock is a plain one, so a thread that closes a stream while it holds the lock waits for itself for
    # ever. It is a hazard of httpcore for every stream that is dropped half-read.
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_POOLS):
            return True
        frame = frame.f_back
    return False


def _close_elsewhere(inner: Any) -> None:
    def close() -> None:
        with suppress(Exception):
            inner.close()

    # Without a name, since the collector must not wait for a thread to start. While the interpreter exits, no thread
    # can be started; the interpreter closes the socket then.
    with suppress(RuntimeError):
        _thread.start_new_thread(close, ())


class _AsyncTee(_Tee):
    def __aiter__(self) -> AsyncIterator[bytes]:
        if not self._first_pass():
            return self._inner.__aiter__()
        inner, self._opened = self._opened or self._inner.__aiter__(), None
        return _AsyncTappedIterator(self._tap, inner, self._before)

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._tap.close()


def _task_is_being_cancelled() -> bool:
    asyncio, task = sys.modules.get("asyncio"), None
    with suppress(RuntimeError):  # an event loop other than asyncio's
        task = None if asyncio is None else asyncio.current_task()
    return task is not None and task.cancelling() > 0


@lru_cache(maxsize=8)
def _tee_class(response_class: type, is_async: bool) -> type[_Tee]:
    base_name, ours = ("AsyncByteStream", _AsyncTee) if is_async else ("SyncByteStream", _SyncTee)
    # By the response, not by the version of the SDK: openai 2 and 3 take clients of httpx and of httpx2.
    for parent in response_class.__mro__:
        library = sys.modules.get(parent.__module__.partition(".")[0])
        base = getattr(library, base_name, None)
        if base is not None:
            return cast("type[_Tee]", type(f"Tee{base_name}", (ours, base), {}))
    raise TypeError(f"{response_class.__name__} is no httpx response")


def install(response: Any, tap: StreamTap, is_async: bool, opened: Any = None, before: bytes = b"") -> None:
    """Replace `response.stream` with a tee, which records the stream while the app reads it."""
    exchange = tap.exchange
    exchange.streamed = True
    # The engine client refuses an encoded stream. Looking costs 5 us until the first token.
    encoding = response.headers.get("content-encoding") if tap.rewriter is None else None
    if encoding and encoding.lower() != "identity":
        exchange.decode = _decoder(type(response), encoding)
    response.stream = _tee_class(type(response), is_async)(tap, response.stream, opened, before)


def _decoder(response_class: Any, encoding: str) -> Callable[[bytes], bytes]:
    # The HTTP library that would decode the answer for the app decodes it here, later and on the recorder's thread.
    def decode(raw: bytes) -> bytes:
        if "," in encoding:
            raise ValueError("encodings in one another, of which each multiplies the size")
        # In small pieces: 300 kB may become 300 MB, and the app, which unpacks as it reads, need not hold them.
        pieces = (raw[at : at + _PIECE_BYTES] for at in range(0, len(raw), _PIECE_BYTES))
        unpacked = bytearray()
        for piece in response_class(200, headers={"content-encoding": encoding}, content=pieces).iter_bytes():
            unpacked += piece
            if len(unpacked) > _MOST_BYTES:
                raise ValueError(f"the stream unpacks to more than {_MOST_BYTES} bytes")
        return bytes(unpacked)

    return decode
