"""Reads the store for a server's metrics, in a thread of its own, so that neither a scrape nor a call waits for it.

It looks at the route every `ROUTE_S` seconds, and at all else every `EVERY_S` seconds at most: after a read that took
long, it rests `_REST` times as long. While the store cannot be read, the page says nothing of it but how long.
"""

import sqlite3
import time
from contextlib import closing
from logging import getLogger
from threading import Event, Thread

from art_patch._lib.words import one_line
from art_patch.errors import ArtPatchError
from art_patch.metrics.catalogue import Page
from art_patch.metrics.from_store import gather
from art_patch.settings import Settings
from art_patch.store import Store, open_store
from art_patch.types import Route

ROUTE_S = 1.0
EVERY_S = 15.0
_REST = 20

log = getLogger(__name__)


class StoreWatch:
    """What the store said when it was last read."""

    def __init__(self, settings: Settings) -> None:
        """Begin without a read; `start` begins to read."""
        self._settings = settings
        self.route: Route | None = None  # the newest that is known
        self.text = b""  # the page, in Prometheus' text format; empty while the store cannot be read
        self._up: bool | None = None
        self._seen_at: float | None = None  # when it could last be read (monotonic clock)
        self._read_at: float | None = None  # when `text` was read
        self._took_s: float | None = None

    def start(self, stop: Event) -> Thread:
        """Start the thread, which ends when `stop` is set; a daemon, because a read that hangs must not keep it."""
        thread = Thread(target=self._run, args=(stop,), name="art-patch-metrics", daemon=True)
        thread.start()
        return thread

    def describe(self, page: Page) -> None:
        """Add whether the store can be read, and how old what is known of it is."""
        page.add("store_up", self._up)
        since = self._read_at if self._up else self._seen_at
        page.add("store_age_seconds", None if since is None else time.monotonic() - since)
        page.add("store_read_seconds", self._took_s)

    def _run(self, stop: Event) -> None:
        trouble = ""
        try:
            while not stop.is_set():
                try:
                    settings = self._settings
                    with closing(open_store(settings.store_url, create=False, project=settings.project)) as store:
                        trouble = ""
                        self._read(store, stop)
                # Whatever it is: a server whose thread has ended would show no metrics any more, and an old route.
                except Exception as error:
                    self._up, self.text = False, b""
                    if str(error) != trouble and not stop.is_set():
                        expected = isinstance(error, ArtPatchError | sqlite3.Error)
                        why = one_line(str(error)) if expected else type(error).__name__
                        log.warning("the store cannot be read for metrics: %s", why, exc_info=not expected)
                    trouble = str(error)
                    stop.wait(ROUTE_S)
        finally:
            self._up, self.text = False, b""

    def _read(self, store: Store, stop: Event) -> None:
        due_at = float("-inf")
        while not stop.is_set():
            self.route = store.ledger.route()
            if (began := time.monotonic()) >= due_at:
                self.text = gather(self._settings, store).text()
                self._read_at = time.monotonic()
                self._took_s = self._read_at - began
                due_at = self._read_at + max(EVERY_S, _REST * self._took_s)
            self._up, self._seen_at = True, time.monotonic()
            stop.wait(ROUTE_S)
