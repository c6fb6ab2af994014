"""Giving up on a stream that does not begin, while the caller's thread is blocked in a socket.

A socket's own timeout cannot do it: it must be long, because a stream that has begun may pause, and the HTTP library
reads it once when the body begins. So one thread looks after all streams that have not begun, and shuts the socket of
one that is late; the reader then sees the connection end. The thread sleeps while there is nothing to look after; it
goes to sleep a second late, because waking it costs a routed stream 45 us until its first token.
An event loop has timers and does not need this.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

from art_patch._lib.faults import faults
from art_patch.patching.rewriting.response_rewriter import TooSlow

TICK_S = 0.05

AWAKE_S = 1.0
"""How long the thread goes on looking after the last stream has begun."""


class Wait:
    """One stream that has not begun. As a context manager it raises `TooSlow` if the stream was given up meanwhile."""

    __slots__ = ("_due", "_socket")

    def __init__(self, socket: Any, due: float) -> None:
        """Begin to wait for `socket`, until the monotonic time `due`."""
        self._socket = [socket]  # whoever pops it decides; `pop` is atomic
        self._due = due

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The stream has begun, or failed by itself, or was given up."""
        try:
            self._socket.pop()
        except IndexError:
            if error is None or isinstance(error, Exception):
                raise TooSlow("the stream did not begin in time") from error

    def is_over(self, now: float) -> bool:
        """Whether nobody needs to look any more; gives up if the stream is late."""
        if self._socket and now >= self._due:
            self._give_up()
        return not self._socket

    def _give_up(self) -> None:
        try:
            self._socket.pop().shutdown(socket.SHUT_RDWR)
        except (IndexError, OSError):
            return  # it has begun this moment, or is closed already


class Watch:
    """All the streams of the process that have not begun."""

    def __init__(self) -> None:
        """Watch nothing, run nothing."""
        self._waits: deque[Wait] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait_for(self, response: Any, timeout_s: float) -> Wait:
        """Look after an open response; one whose socket is not known (a test double's, say) may take its time."""
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
                except RuntimeError as error:  # too many threads, or the interpreter is going down
                    faults.trouble("patching.watch", error)
                    return
                self._thread = thread

    def _run(self) -> None:
        pause = threading.Event()  # not time.sleep: test suites that mock the clock would see it
        while True:
            self._wake.wait()
            sleeps_at = time.monotonic() + AWAKE_S
            while (now := time.monotonic()) < sleeps_at:
                if self._waits:
                    sleeps_at = now + AWAKE_S
                for _ in range(len(self._waits)):
                    wait = self._waits.popleft()
                    if not wait.is_over(now):
                        self._waits.append(wait)
                pause.wait(TICK_S)
            self._wake.clear()
            if self._waits:  # whoever came since the last look may have found the flag set
                self._wake.set()


def _after_fork() -> None:
    watch.__init__()


watch = Watch()
"""The process's own."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
