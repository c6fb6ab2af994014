"""What a running server keeps true: the champion is loaded, and the route leads to a server that is there.

Loaded again is also the policy that is tested. Of several servers of a project the one that came last has the route;
when it has ended, or does not answer any more, one that is left takes it. A server on another machine may be alive
although it cannot be reached from here: then it takes the route back, and is left alone from there on.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from art_patch.errors import ArtPatchError, EngineError
from art_patch.promotion import unwanted
from art_patch.serving import EngineClient
from art_patch.store import Ledger
from art_patch.types import Route

EVERY_S = 2.0
"""Seconds between two looks."""
MISSES = 2
"""So many looks in a row must find nobody where the route leads before it is taken."""
RETRY_S = 30.0
"""After a policy could not be loaded, it is left alone for so long."""

log = logging.getLogger("art_patch.serve")


class ServingUpkeep:
    """Looks after one server, from a thread beside it."""

    def __init__(self, ledger: Ledger, engine: EngineClient, address: str, take: Callable[[Route], bool]) -> None:
        """Do nothing yet.

        Args:
            ledger: of the project.
            engine: the server.
            address: where apps reach it, as the route names it.
            take: turns the route to it, unless somebody else has done so since this route was read; whether it did.
        """
        self._ledger, self._engine, self._address, self._take = ledger, engine, address, take
        self._retry_at: dict[str, float] = {}
        self._missed: tuple[str | None, float | None, int] = (None, None, 0)
        self._taken_from: str | None = None

    def look(self) -> None:
        """Look once, and mend what is not as it must be.

        Raises:
            EngineError: the server cannot be asked.
            StoreError: the store cannot be read.
        """
        if self._engine.health():
            self._load_missing()
            self._take_route()

    def keep(self, stop: Event) -> None:
        """Look again and again until `stop` is set. What goes wrong is logged once, and the next look tries again."""
        trouble = ""
        while not stop.wait(EVERY_S):
            try:
                self.look()
                trouble = ""
            except (ArtPatchError, sqlite3.Error) as error:
                if str(error) != trouble and not stop.is_set():
                    log.warning("what must serve was not looked at: %s", error)
                trouble = str(error)

    def _load_missing(self) -> None:
        # In this order: a policy that is let go leaves the ledger before it leaves the server.
        served, route = self._engine.models(), self._ledger.route()
        must = [name for name in (route.champion, route.challenger) if name is not None and name not in served]
        if not must:
            return
        served = self._engine.models()  # a promotion loads it, and turns the ledger between our two looks
        if any([self._load(name) for name in must if name not in served]):
            for old in unwanted(self._ledger, self._engine.models()):
                with suppress(EngineError):
                    self._engine.unload(old)

    def _take_route(self) -> None:
        route = self._ledger.route()
        if route.base_url == self._address or (route.base_url is not None and not self._is_left(route.base_url, route)):
            return
        if route.champion is None or route.champion not in self._engine.models():
            return
        if self._take(route):
            self._taken_from = route.base_url
            why = "no server had it" if route.base_url is None else f"{route.base_url} does not answer any more"
            log.warning("%s took the route over: %s", self._address, why)

    def _is_left(self, address: str, route: Route) -> bool:
        with EngineClient(address) as other:
            alive = other.answers()
        if alive:
            self._taken_from, self._missed = None, (None, None, 0)
            return False
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
            self._retry_at[name] = now + RETRY_S
            log.warning("%s must serve and cannot be loaded: %s", name, error)
            return False
        self._retry_at.pop(name, None)
        log.warning("%s must serve and was not loaded; it is loaded now", name)
        return True
