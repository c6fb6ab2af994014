"""Ends a stream that does not begin within its time limit, while the caller's thread is blocked reading the socket.

The HTTP library reads the socket's timeout only once, when the body begins, and it must be long, because a stream that
has begun may pause. So one thread watches all streams that have not begun, and shuts down the socket of a late one; the
blocked reader then finds the connection closed. Asynchronous clients do not need this: an event loop has timers.
"""

import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.response_rewriter import TooSlow

TICK_S = 0.05

# The thread stays awake for this long after the last stream has begun: waking it delays a first token by 45 us.
AWAKE_S = 1.0


class Wait:
    """A stream that has not begun. As a context manager, it raises `TooSlow` if the watch has ended the stream."""

    __slots__ = ("_due", "_socket")

    def __init__(self, socket: Any, due: float) -> None:
        """Wait for `socket` until the monotonic time `due`."""
        self._socket = [socket]  # `pop` is atomic, so either the reader or the watch ends the wait, never both
        self._due = due

    def __enter__(self) -> None:
        """Begin the wait, which is watched already."""

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """End the wait: the stream has begun, has failed, or was given up."""
        try:
            self._socket.pop()
        except IndexError:
            if error is None or isinstance(error, Exception):
                raise TooSlow("the stream did not begin in time") from error

    def is_over(self, now: float) -> bool:
        """Return whether the wait has ended. If the stream is late, its socket is shut down first."""
        if self._socket and now >= self._due:
            with suppress(IndexError, OSError):  # the stream has begun at this moment, or its socket is closed already
                self._socket.pop().shutdown(socket.SHUT_RDWR)
        return not self._socket


class Watch:
    """Watches, in one thread, all streams of the process that have not begun."""

    def __init__(self) -> None:
        self._waits: deque[Wait] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait_for(self, response: Any, timeout_s: float) -> Wait:
        """Watch an open response until its stream begins. A response without a known socket is not watched."""
        stream = response.extensions.get("network_stream")
        found = None if stream is None else stream.get_extra_info("socket")
        wait = Wait(found, time.monotonic() + timeout_s)
        if found is None:
            return wait
        self._waits.append(wait)
        if self._thread is None:
            self._start()
        if not self._wake.is_set():
            self._wake.set()
        return wait

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="art_patch-watch", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # too many threads, or the interpreter is going down
                    faults.trouble("patching.watch", error)

    def _run(self) -> None:
        pause = threading.Event()  # not `time.sleep`: a test suite of the app may have mocked it
        while True:
            self._wake.wait()
            sleeps_at = time.monotonic() + AWAKE_S
            while (now := time.monotonic()) < sleeps_at:
                if self._waits:
                    sleeps_at = now + AWAKE_S
                for _ in range(len(self._waits)):
                    # A rotation by known length: callers append at the same time, and no lock is needed.
                    wait = self._waits.popleft()
                    if not wait.is_over(now):
                        self._waits.append(wait)
                pause.wait(TICK_S)
            self._wake.clear()
            if self._waits:  # a stream that was added since the last look may have found the flag still set
                self._wake.set()


def _after_fork() -> None:
    # The thread does not exist in the child, and its lock may have been held at the fork.
    watch.__init__()


watch = Watch()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
