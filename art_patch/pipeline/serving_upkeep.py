"""Keeps a running server ready to serve: loads policies that it lacks, and takes over the route from a dead server.

It also extends the search index, for a moment at a time, and logs decisions on policies and changes of the route,
whoever made them (`DecisionLog`, which jobs use, too).

The route, in the store, tells apps which server to call. If a project has several servers, the one that started last
has the route. Another server takes it over:

- at its next look, if the server of the route says that it stops, or is a process of this machine that has ended;
- after `MISSES` looks in which that server does not answer, or is not well.

A server that stops goes on answering until another one has the route and apps have read that, so no call goes upstream.
If a server is killed, calls go upstream until the next look of another one, and the next look of the apps at the route.

The old server may run on another machine and only be unreachable from here. In that case it takes the route back, and
this server does not take it a second time, unless the old server has answered from here in between.
"""

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event

from art_patch import promotion, serving
from art_patch._lib.events import event, route_turned
from art_patch._lib.process import lives
from art_patch.errors import ArtPatchError, EngineError
from art_patch.store import Ledger, Server, Store
from art_patch.types import JSON, Route

EVERY_S = 1.0  # seconds between two checks of the server, its policies and the route
MISSES = 2
"""Number of checks in a row in which the route's server does not answer before another server takes the route over."""
RETRY_S = 30.0  # seconds to wait after a failed load before the same policy is loaded again
BEAT_S = 5.0  # seconds between two signs of life of a server
FORGET_S = 60.0  # the row of a server on another machine that gives no sign of life for so long is deleted
INDEX_EVERY_S, INDEX_S = 10.0, 0.3  # how often, and how long at once, the search index is extended
_DECISIONS_AT_ONCE = 100  # that a look reads first
_EVENTS = {"champion": "promotion", "rejected": "rejection"}  # state -> name of the event in the log
LEAVE_S = 5.0  # longest time for which a server that stops waits for another one to take the route

log = logging.getLogger("art_patch.serve")


class ServingUpkeep:
    """Keeps one server of a project ready to serve, from a background thread."""

    def __init__(
        self, store: Store, engine: serving.EngineClient, me: Server, take: Callable[[Route], bool],
        *, follow_s: float = 0.0, search: bool = False,
    ) -> None:  # fmt: skip
        """Keep this server's client and row; `take` points an unchanged route to it and returns whether it did.

        `follow_s` is how long apps may take to follow a changed route. With `search`, the search index is extended.
        """
        self._search, self._searched_at = store.search if search else None, -INDEX_EVERY_S
        self._ledger, self._servers, self._engine, self._take = store.ledger, store.servers, engine, take
        self._me, self._address, self._follow_s = me, me.base_url, follow_s
        self._renewed_at = time.monotonic()
        # By the id of another server: how often it has given a sign of life, and when that last changed here.
        self._heard: dict[str, tuple[int, float]] = {}
        self._decisions = DecisionLog(store.ledger)
        self._retry_at: dict[str, float] = {}
        self._missed: tuple[str | None, float | None, int] = (None, None, 0)
        self._taken_from: str | None = None

    def look(self) -> None:
        """Log decisions, load what must serve and take a dead server's route; `EngineError` if this one is down."""
        self._decisions.look()
        if self._engine.health():
            self._load_missing()
            self._take_route()
            if time.monotonic() - self._renewed_at >= BEAT_S:
                self._me, self._renewed_at = self._servers.renew(self._me, now=time.time()), time.monotonic()
        self._forget_ended()
        if self._search is not None and time.monotonic() - self._searched_at >= INDEX_EVERY_S:
            self._search.extend(seconds=INDEX_S)
            self._searched_at = time.monotonic()

    def keep(self, stop: Event) -> None:
        """Call `look` every `EVERY_S` seconds until `stop` is set, then leave the route to another server.

        An error is logged once; the next call retries.
        """
        trouble = ""
        while not stop.wait(EVERY_S):
            try:
                self.look()
                trouble = ""
            # Whatever it is: a server whose thread has ended would answer on, but load and hand over nothing any more.
            except Exception as error:
                if str(error) != trouble and not stop.is_set():
                    expected = isinstance(error, (ArtPatchError, sqlite3.Error))
                    log.warning("what must serve was not looked at: %s", error, exc_info=not expected)
                trouble = str(error)
        for last in (self._decisions.look, self._leave):
            with suppress(ArtPatchError, sqlite3.Error):
                last()

    def _leave(self) -> None:
        self._me = self._servers.renew(self._me, leaving=True, now=time.time())
        others = [each for each in self._others() if not each.leaving and lives(each.owner) is not False]
        until = time.monotonic() + (LEAVE_S if others else 0.0)
        while time.monotonic() < until and self._ledger.route().base_url == self._address:
            time.sleep(0.1)
        if others:  # also if the route changed a moment ago: some apps have not read it yet
            time.sleep(self._follow_s)

    def _others(self) -> list[Server]:
        return [each for each in self._servers.all() if each.owner.id != self._me.owner.id]

    def _forget_ended(self) -> None:
        route, now = self._ledger.route().base_url, time.monotonic()
        heard: dict[str, tuple[int, float]] = {}
        for each in self._others():
            beat, at = self._heard.get(each.owner.id, (each.beat, now))
            heard[each.owner.id] = (each.beat, at if each.beat == beat else now)
            alive = lives(each.owner)
            ended = alive is False or (alive is None and now - heard[each.owner.id][1] >= FORGET_S)
            # The row of the server that has the route tells that it has ended, until another one has the route.
            if ended and (each.base_url != route or route == self._address):
                self._servers.remove(each)
        self._heard = heard

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
        if route.base_url == self._address:
            return
        why = "no server had it" if route.base_url is None else self._why_left(route.base_url, route)
        if not why:
            return
        first = route.champion or route.challenger or route.learner
        if first is None or first not in self._engine.models():
            return
        if self._take(route):
            self._taken_from = route.base_url
            log.warning("%s took the route over: %s", self._address, why)

    def _why_left(self, address: str, route: Route) -> str:
        """Return that the route's server stops, has ended, or was not well `MISSES` times in a row; else nothing.

        Of an address that somebody else has set, any answer is enough.
        """
        its = [each for each in self._others() if each.base_url == address]
        if its and all(each.leaving or lives(each.owner) is False for each in its):
            return f"{address} {'stops' if any(each.leaving for each in its) else 'has ended'}"
        with serving.EngineClient(address) as other:
            alive = other.health() if its else other.answers()
        if alive:
            self._taken_from, self._missed = None, (None, None, 0)
            return ""
        # The count is that of one server: the same address with another `engine_since` is a server that restarted.
        url, since, count = self._missed
        count = count + 1 if (url, since) == (address, route.engine_since) else 1
        self._missed = (address, route.engine_since, count)
        return f"{address} does not answer any more" if count >= MISSES and address != self._taken_from else ""

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


class DecisionLog:
    """Remembers what was logged. A new one begins with what is decided after it was made.

    If the store was put back from a backup meanwhile, numbers of decisions begin again at a lower one. What was decided
    after the newest decision that was seen is then logged by its time.
    """

    def __init__(self, ledger: Ledger) -> None:
        """Look at the ledger for the first time."""
        self._ledger, self._route = ledger, ledger.route()
        self._seen: JSON = next(iter(ledger.history(limit=1)), {"id": 0, "at": 0.0})

    def look(self) -> None:
        """Log what was decided since the last look, a line each; a store out of reach raises its errors."""
        route, new = self._ledger.route(), self._new()
        for move in reversed(new):
            # One is gone back to without a test.
            again = move["to_state"] == "champion" and move["from_state"] in ("retired", "learner")
            earlier = self._ledger.history(limit=None, policy=move["policy"]) if again else []
            again = any(each["to_state"] == "champion" and each["id"] < move["id"] for each in earlier)
            self._seen = move
            _log_move("rollback" if again else _EVENTS.get(move["to_state"], "decision"), move)
        route_turned(self._route, route)
        self._route = route

    def _new(self) -> list[JSON]:
        most = _DECISIONS_AT_ONCE
        while True:
            moves = self._ledger.history(limit=most)
            if len(moves) < most or moves[-1]["id"] <= self._seen["id"]:
                break
            most *= 10
        seen, is_seen = self._seen, any(all(move[key] == self._seen[key] for key in ("id", "at")) for move in moves)
        if is_seen or not seen["id"]:
            return [move for move in moves if move["id"] > seen["id"]]
        self._seen = moves[0] if moves else {"id": 0, "at": seen["at"]}
        return [move for move in moves if move["at"] > seen["at"]]


def _log_move(kind: str, move: JSON) -> None:
    names = {name: move[name] for name in ("policy", "from_state", "to_state", "who", "reason", "at")}
    event(
        "decisions", "%s: %s is %s now, it was %s, by %s: %s", kind, move["policy"], move["to_state"],
        move["from_state"] or "new", move["who"], move["reason"], event=kind, **names,
    )  # fmt: skip
