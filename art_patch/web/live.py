"""Tells open pages what has changed in a store, as server-sent events: one thread asks for all readers of a project.

Apps write to the store and know nothing of this server. So the store is asked for its newest rows once in `EVERY_S`,
with queries that read the end of an index, and only while somebody listens. A reader who does not keep up misses events
and no state: an event says what kind of thing changed, and the page asks for it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress

from art_patch.errors import ArtPatchError

KINDS = ("calls", "scores", "groups", "moves", "cycle", "apps", "sums")
"""What can change: recorded calls, scores, groups, states of policies, the cycle that runs, reports of apps, and sums.

Sums over a large store are made in the background (`Project.kept`): a page that shows an older one shows itself again.
"""

EVERY_S = 0.7
_KEEP_ALIVE_S = 15.0  # a comment after so long without an event, so that proxies keep the connection
_LOOK_S = 1.0  # so often a stream asks whether its reader may still see the project
_MOST_READERS = 200  # of a project
_MOST_OF_ONE = 50  # of a session, so that no browser keeps the others from following

Marks = Mapping[str, object]

log = logging.getLogger("art_patch.web")


class Live:
    """The readers of one project. Its thread runs while there are any."""

    def __init__(self, look: Callable[[], Marks]) -> None:
        """`look` returns for each kind a mark that is another one after each change."""
        self._look, self._lock = look, threading.Lock()
        self._readers: dict[asyncio.Queue[str], tuple[asyncio.AbstractEventLoop, str]] = {}  # and whose they are
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def is_full(self, who: str) -> bool:
        """Whether as many pages follow the project, or as many of `who`, as a server serves."""
        with self._lock:
            its = sum(whose == who for _, whose in self._readers.values())
            return len(self._readers) >= _MOST_READERS or its >= _MOST_OF_ONE

    async def events(self, is_open: Callable[[], bool], who: str) -> AsyncGenerator[bytes]:
        """Yield the stream of one reader of `who`, while `is_open`."""
        mine: asyncio.Queue[str] = asyncio.Queue(len(KINDS) * 4)
        silent_s = 0.0
        with self._lock:
            self._readers[mine] = asyncio.get_running_loop(), who
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="art_patch-web-live", daemon=True)
                self._thread.start()
        try:
            yield b"retry: 2000\n\n"
            while not self._stop.is_set() and is_open():
                try:
                    kind = await asyncio.wait_for(mine.get(), _LOOK_S)
                except TimeoutError:
                    silent_s += _LOOK_S
                    if silent_s >= _KEEP_ALIVE_S:
                        silent_s = 0.0
                        yield b": still here\n\n"
                else:
                    silent_s = 0.0
                    yield f"event: {kind}\ndata: 1\n\n".encode()
        finally:
            with self._lock:
                self._readers.pop(mine, None)

    def close(self) -> None:
        """End the thread; streams end with their connections."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5 * EVERY_S)

    def _watch(self) -> None:
        seen: Marks | None = None
        while True:
            try:
                now = self._look()
            # A database that is down for a while, or a file that is half written: the next look tells.
            except (ArtPatchError, OSError) as error:
                log.debug("a look at the store failed: %s", error)
            else:
                before = now if seen is None else seen
                for kind in KINDS:
                    if now.get(kind) != before.get(kind):
                        self.tell(kind)
                seen = now
            if self._stop.wait(EVERY_S):
                return
            with self._lock:
                if not self._readers:
                    self._thread = None
                    return

    def tell(self, kind: str) -> None:
        """Tell all readers that something of this kind has changed."""
        with self._lock:
            readers = list(self._readers.items())
        for queue, (loop, _) in readers:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_put, queue, kind)


def _put(queue: asyncio.Queue[str], kind: str) -> None:
    with suppress(asyncio.QueueFull):
        queue.put_nowait(kind)
