"""Keeps a running server ready to serve: loads policies that it lacks, and takes over the route from a dead server.

The route, in the store, tells apps which server to call. If a project has several servers, the one that started last
has the route. When it ends or stops answering, another server takes the route over. The old server may run on another
machine and only be unreachable from here. In that case it takes the route back, and this server does not take it a
second time, unless the old server has answered from here in between.
"""

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from art_patch import promotion, serving
from art_patch.errors import ArtPatchError, EngineError
from art_patch.pipeline.decision_log import DecisionLog
from art_patch.store import Ledger
from art_patch.types import Route

EVERY_S = 2.0  # seconds between two checks of the server, its policies and the route
MISSES = 2
"""Number of checks in a row in which the route's server does not answer before another server takes the route over."""
RETRY_S = 30.0  # seconds to wait after a failed load before the same policy is loaded again

log = logging.getLogger("art_patch.serve")


class ServingUpkeep:
    """Keeps one server of a project ready to serve, from a background thread."""

    def __init__(
        self, ledger: Ledger, engine: serving.EngineClient, address: str, take: Callable[[Route], bool]
    ) -> None:
        """Keep this server's client and address; `take` points an unchanged route to it and returns whether it did."""
        self._ledger, self._engine, self._address, self._take = ledger, engine, address, take
        self._decisions = DecisionLog(ledger)
        self._retry_at: dict[str, float] = {}
        self._missed: tuple[str | None, float | None, int] = (None, None, 0)
        self._taken_from: str | None = None

    def look(self) -> None:
        """Log decisions, load what must serve and take a dead server's route; `EngineError` if this one is down."""
        self._decisions.look()
        if self._engine.health():
            self._load_missing()
            self._take_route()

    def keep(self, stop: Event) -> None:
        """Call `look` every `EVERY_S` seconds until `stop` is set. An error is logged once; the next call retries."""
        trouble = ""
        while not stop.wait(EVERY_S):
            try:
                self.look()
                trouble = ""
            except (ArtPatchError, sqlite3.Error) as error:
                if str(error) != trouble and not stop.is_set():
                    log.warning("what must serve was not looked at: %s", error)
                trouble = str(error)
        with suppress(ArtPatchError, sqlite3.Error):
            self._decisions.look()

    def _load_missing(self) -> None:
        # The server is asked before the ledger: a policy that is retired leaves the ledger before the server unloads
        # it, so this order never loads a retired policy again.
        served, route = self._engine.models(), self._ledger.route()
        asked = (route.champion, route.learner, route.challenger)
        must = [name for name in asked if name is not None and name not in served]
        if not must:
            return
        # A promotion may have loaded it between the two reads above.
        served = self._engine.models()
        # A list, because `any` over a generator would stop after the first policy.
        if any([self._load(name) for name in must if name not in served]):
            for old in promotion.unwanted(self._ledger, self._engine.models()):
                with suppress(EngineError):
                    self._engine.unload(old)

    def _take_route(self) -> None:
        route = self._ledger.route()
        if route.base_url == self._address or (route.base_url is not None and not self._is_left(route.base_url, route)):
            return
        first = route.champion or route.challenger or route.learner
        if first is None or first not in self._engine.models():
            return
        if self._take(route):
            self._taken_from = route.base_url
            why = "no server had it" if route.base_url is None else f"{route.base_url} does not answer any more"
            log.warning("%s took the route over: %s", self._address, why)

    def _is_left(self, address: str, route: Route) -> bool:
        """Return whether no server answers at the route's address, `MISSES` times in a row."""
        with serving.EngineClient(address) as other:
            alive = other.answers()
        if alive:
            self._taken_from, self._missed = None, (None, None, 0)
            return False
        # The count is that of one server: the same address with another `engine_since` is a server that restarted.
        url, since, count = self._missed
        count = count + 1 if (url, since) == (address, route.engine_since) else 1
        self._missed = (address, route.engine_since, count)
        return count >= MISSES and address != self._taken_from

    def _load(self, name: str) -> bool:
        now = time.monotonic()
        if now < self._retry_at.get(name, now):
            return False
        try:
            self._engine.load(name)
        except EngineError as error:
            # A failed load may take the engine seconds of its time for answers, so it is not tried in every look.
            self._retry_at[name] = now + RETRY_S
            log.warning("%s must serve and cannot be loaded: %s", name, error)
            return False
        self._retry_at.pop(name, None)
        log.warning("%s must serve and was not loaded; it is loaded now", name)
        return True
