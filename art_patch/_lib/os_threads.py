"""Threads, locks and queues of the operating system, even where gevent has replaced Python's.

As a greenlet, the writer would stop the app's whole event loop whenever SQLite or the store's lock makes it wait, and
gevent's own locks do not work between a greenlet and a real thread. gevent may patch before or after us.

`Queue` is not `SimpleQueue`, although that one is the operating system's, too: before Python 3.13 its
`get(timeout=...)` waits for ever if a signal interrupts it when its time is just over.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
from _thread import RLock  # `threading.RLock` is what gevent replaces; this is not
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def _original(name: str) -> Any:
    """Return an attribute of `_thread` as Python made it, even where gevent has replaced it."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return getattr(_thread, name) if monkey is None else monkey.get_original("_thread", name)


_allocate_lock: Callable[[], _thread.LockType] = _original("allocate_lock")
get_ident: Callable[[], int] = _original("get_ident")
"""Returns the id of the running thread; greenlets of one thread have the same."""


class Flag:
    """Like `threading.Event`, except that `wait` lowers the flag again. A finaliser may raise it."""

    def __init__(self) -> None:
        # A lock that is held means lowered; `set` needs no second lock, so a finaliser cannot deadlock in it.
        self._lowered = _allocate_lock()
        self._lowered.acquire()

    def set(self) -> None:
        """Raise the flag."""
        if self._lowered.locked():
            with suppress(RuntimeError):  # another thread was faster
                self._lowered.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is raised, and lower it; return false if that took longer than `timeout_s`."""
        return self._lowered.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))

    def clear(self) -> None:
        """Lower the flag."""
        self._lowered.acquire(blocking=False)


class Queue(Generic[T]):
    """Like `queue.SimpleQueue`, for one reader. A finaliser may put items."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._filled = Flag()

    def put(self, item: T) -> None:
        """Append an item."""
        self._items.append(item)
        self._filled.set()

    def get(self, timeout_s: float = 0.0) -> T:
        """Take the oldest item; raises `Empty` if none came within `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not self._items:  # the flag may still be up for an item that was taken
            if not self._filled.wait(end - time.monotonic()):
                raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether no item waits."""
        return not self._items


class NativeThread:
    """A daemon thread of the operating system, even under gevent."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._target = target
        self._name = name
        self._ended = Flag()

    def start(self) -> None:
        """Start the thread; raises a `RuntimeError` if there are too many, or the interpreter is going down."""
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
        """Wait until the thread has ended, at most `timeout_s`."""
        if self._ended.wait(timeout_s):
            self._ended.set()  # `wait` lowered it; a second join must return at once


__all__ = ["Empty", "Flag", "NativeThread", "Queue", "RLock", "get_ident"]
