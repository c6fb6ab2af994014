"""Threads, locks and queues of the operating system, also where gevent has put its own in their place.

As a greenlet, the writer would stop the app's whole event loop whenever SQLite or the store's lock makes it wait; and
gevent's own locks are not for use between a greenlet and a real thread. It makes no difference whether gevent patches
before or after us.

Why not `SimpleQueue`, which is the operating system's too: before Python 3.13 its `get(timeout=...)` waits for ever if
a signal interrupts it when its time is just over.
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
    """Return what `_thread` holds under that name, also where gevent has replaced it."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return getattr(_thread, name) if monkey is None else monkey.get_original("_thread", name)


_allocate_lock: Callable[[], _thread.LockType] = _original("allocate_lock")
get_ident: Callable[[], int] = _original("get_ident")
"""Which thread this is; greenlets of one thread are one."""


class Flag:
    """Like `threading.Event`, except that waiting for it takes it down. May be raised from a finaliser."""

    def __init__(self) -> None:
        """Start lowered."""
        self._lowered = _allocate_lock()
        self._lowered.acquire()

    def set(self) -> None:
        """Raise it."""
        if self._lowered.locked():
            with suppress(RuntimeError):  # another thread was faster
                self._lowered.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is raised, and lower it; false if that took longer than `timeout_s`."""
        return self._lowered.acquire(timeout=min(max(0.0, timeout_s), threading.TIMEOUT_MAX))

    def clear(self) -> None:
        """Lower it."""
        self._lowered.acquire(blocking=False)


class Queue(Generic[T]):
    """Like `queue.SimpleQueue`, for one reader. Items may be put from a finaliser."""

    def __init__(self) -> None:
        """Start empty."""
        self._items: deque[T] = deque()
        self._filled = Flag()

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        self._filled.set()

    def get(self, timeout_s: float = 0.0) -> T:
        """Take the oldest item.

        Raises:
            Empty: none came within `timeout_s`.
        """
        end = time.monotonic() + timeout_s
        while not self._items:  # the flag may still be up for an item that was taken
            if not self._filled.wait(end - time.monotonic()):
                raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether there is none."""
        return not self._items


class NativeThread:
    """A daemon thread."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        """Do not start yet."""
        self._target = target
        self._name = name
        self._ended = Flag()

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: if there are too many threads, or the interpreter is going down.
        """
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
        """Wait until it has ended, at most so long."""
        if self._ended.wait(timeout_s):
            self._ended.set()


__all__ = ["Empty", "Flag", "NativeThread", "Queue", "RLock", "get_ident"]
