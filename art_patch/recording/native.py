"""Threads, locks and queues of the operating system, also where gevent has put its own in their place.

As a greenlet, the writer would stop the app's whole event loop whenever SQLite or the store's lock makes it wait; and
gevent's own locks are not for use between a greenlet and a real thread. It makes no difference whether gevent patches
before or after us.
"""

from __future__ import annotations

import sys
import threading
from _queue import SimpleQueue  # `queue.SimpleQueue` and `threading.RLock` are what gevent replaces; these are not
from _thread import RLock
from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from typing import Any


class Flag:
    """Like `threading.Event`, except that waiting for it takes it down. May be raised from a finaliser."""

    def __init__(self) -> None:
        """Start lowered."""
        self._raised: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Raise it."""
        self._raised.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is raised, and lower it; false if that took longer than `timeout_s`."""
        try:
            self._raised.get(timeout=max(0.0, timeout_s))
        except Empty:
            return False
        self.clear()
        return True

    def clear(self) -> None:
        """Lower it."""
        with suppress(Empty):
            while True:
                self._raised.get_nowait()


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
            monkey.get_original("_thread", "start_new_thread")(self._run, ())
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


__all__ = ["Empty", "Flag", "NativeThread", "RLock", "SimpleQueue"]
