"""Provides threads, locks and queues of the operating system, even if gevent has replaced Python's own by greenlets.

As a greenlet, the recorder's writer would stop the app's event loop whenever it waits, and gevent's locks do not work
between a greenlet and a real thread. gevent may patch the process before or after art_patch is imported.

`Queue` replaces `SimpleQueue`, which gevent does not change, because of a bug before Python 3.13: its
`get(timeout=...)` waits forever if a signal interrupts it at the moment its time is over.
"""

import _thread
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty
from typing import Any, Generic, TypeVar

T = TypeVar("T")

RLock = _thread.RLock  # `threading.RLock` is what gevent replaces; this is not


def _original(name: str) -> Any:
    """Return an attribute of `_thread` as Python made it, even where gevent has replaced it."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return getattr(_thread, name) if monkey is None else monkey.get_original("_thread", name)


_allocate_lock: Callable[[], _thread.LockType] = _original("allocate_lock")
get_ident: Callable[[], int] = _original("get_ident")
"""Returns the id of the running thread; greenlets of one thread have the same."""


class Flag:
    """An event for one waiting thread: like `threading.Event`, but `wait` clears it. A finaliser may call `set`."""

    def __init__(self) -> None:
        # A lock that is held means lowered; `set` needs no second lock, so a finaliser cannot deadlock in it.
        self._lowered = _allocate_lock()
        self._lowered.acquire()

    def set(self) -> None:
        """Set the flag, which ends the `wait` of the waiting thread."""
        if self._lowered.locked():
            with suppress(RuntimeError):  # another thread was faster
                self._lowered.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set, and clear it; returns false if that took longer than `timeout_s`."""
        return self._lowered.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))

    def clear(self) -> None:
        """Clear the flag, so that the next `wait` waits for a new `set`."""
        self._lowered.acquire(blocking=False)


class Queue(Generic[T]):
    """Like `queue.SimpleQueue`, for one reading thread. A finaliser may call `put`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = Flag()

    def put(self, item: T) -> None:
        """Append an item to the queue; never waits."""
        self._items.append(item)
        self._filled.set()

    def get(self, timeout_s: float = 0.0) -> T:
        """Remove and return the oldest item; raises `Empty` if there is none within `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not self._items:  # the flag may still be up for an item that was taken
            if not self._filled.wait(end - time.monotonic()):
                raise Empty
        return self._items.popleft()

    def __iter__(self) -> Iterator[T]:
        """Look at what is in the queue now."""
        return iter(self._items.copy())

    def empty(self) -> bool:
        """Whether the queue holds no item."""
        return not self._items


class NativeThread:
    """A daemon thread of the operating system, even if gevent has replaced `threading`."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._target = target
        self._name = name
        self._ended = Flag()

    def start(self) -> None:
        """Start the thread; `RuntimeError` if the system has too many threads, or the interpreter is shutting down."""
        if sys.is_finalizing():  # Python 3.11 would wait for ever for a thread that never begins
            raise RuntimeError("the interpreter is going down")
        monkey: Any = sys.modules.get("gevent.monkey")
        if monkey is not None and monkey.is_module_patched("threading"):
            _original("start_new_thread")(self._run, ())
        else:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._ended.set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, but at most `timeout_s`."""
        if self._ended.wait(timeout_s):
            self._ended.set()  # `wait` lowered it; a second join must return at once


__all__ = ["Empty", "Flag", "NativeThread", "Queue", "RLock", "get_ident"]
