"""Holds the state of the patch: settings, target, recorder, circuit breakers, engine clients and pins.

`patch()` computes the target from the route in the store, so that the very first call is routed; then the recorder's
thread computes it every `poll_interval_s`. A call reads the store itself only if that thread does not run yet, or the
engine answered 404. A store behind a network is read by the recorder's thread alone, because no call may wait for it.
Until its first read, calls go upstream; in mode `route` their records give this reason.
"""

import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from art_patch._lib.events import route_turned
from art_patch._lib.faults import faults
from art_patch._lib.forking import late_import
from art_patch._lib.version import __version__
from art_patch.patching.rewriting.engine_request import EngineClients
from art_patch.patching.routing.shadow import Shadow
from art_patch.patching.routing.target import Breaker, Pins, Target, is_alive, resolve
from art_patch.patching.sdk.surfaces import compile_match
from art_patch.recording import Recorder, Sink
from art_patch.settings import Settings
from art_patch.store import waits_for_network
from art_patch.types import JSON, Mode, Route

REFRESH_EVERY_S = 1.0
HEALTH_CHECK_EVERY_S = 2.0

# Calls that wait for the engine at once, before answers have shown that it has room for more.
FIRST_ROOM = 100

# A report that has changed is written after 10 s at the earliest, one that has not after 60 s.
REPORT_EVERY_S = 10.0
REPORT_AT_LEAST_EVERY_S = 60.0
# What `art-patch promote`, `rollback`, `reject` and `mode` change.
SHARES = ("canary_percent", "challenger_percent", "control_percent")
FOLLOWED = ("mode", "champion", "challenger", "challenger_state", *SHARES)

_HOST = socket.gethostname()

NOT_READ_YET = "the store's server has not told yet who serves"

ReadRoute = Callable[[str, str], Route]


def _read_route(url: str, project: str) -> Route:
    with late_import():  # the recorder's thread is the first to ask a store behind a network
        from art_patch.store import read_route
    return read_route(url, project)


class Status(NamedTuple):
    """The state of the patch, and its counts since `patch()`, which sum up all projects of the process.

    Attributes:
        mode: the current mode. A mode in the store overrules the one that the app has set.
        challenger: name of the policy under test (canary or shadow).
        challenger_state: `shadow`: the policy under test is asked in the background; `canary`: it answers a share of
            the sessions.
        base_url: address of the engine that serves the champion and the policy under test.
        dropped: number of records that were lost, because the queue was full or the store refused them.
        queued: number of records that wait to be written to the store.
        fallbacks: number of recorded calls that should have been answered by a policy and were answered by upstream.
        engine_full: number of those fallbacks that went upstream because the engine had no room for them.
        not_routed: number of calls that no policy can answer, by API and reason. They are no fallbacks.
        shadowed: number of answers that policies gave in the background, in mode or state `shadow`.
        shadow_skipped: number of background calls that were not made: `shadow_per_minute` was used up, too many calls
            were waiting, the engine was failing or full, or the policy was not to be asked any more.
        instrumented: the patched SDK with its version, and the integrations in use.
        bypasses: number of calls that a library sent without the OpenAI SDK, by the way it sent them. Calls of
            libraries that art_patch does not know are not counted.
        open_breakers: the circuit breakers that are not closed, so that calls go upstream: `engine`, `challenger`.
        errors: number of faults of art_patch and errors of the store, by the place in the code.
        degraded: one sentence for each thing that does not work right now.
        projects: the status of each project, if there are several; fields that are no counts are above the first's.
    """

    patched: bool = False
    mode: Mode = "off"
    champion: str | None = None
    challenger: str | None = None
    challenger_state: Literal["shadow", "canary"] | None = None
    base_url: str | None = None
    recorded: int = 0
    dropped: int = 0
    queued: int = 0
    served_by_policy: int = 0
    fallbacks: int = 0
    engine_full: int = 0
    not_routed: Mapping[str, int] = MappingProxyType({})
    shadowed: int = 0
    shadow_skipped: int = 0
    shadow_failed: int = 0
    instrumented: tuple[str, ...] = ()
    bypasses: Mapping[str, int] = MappingProxyType({})
    open_breakers: tuple[str, ...] = ()
    errors: Mapping[str, int] = MappingProxyType({})
    degraded: tuple[str, ...] = ()
    projects: Mapping[str, "Status"] = MappingProxyType({})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON has them. Web frameworks make a list without names of a named tuple."""
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in self._asdict().items()}
        return plain | {"projects": {name: each.as_dict() for name, each in self.projects.items()}}


class Runtime:
    """The state that the wrappers of the SDK use in each call, one runtime for each patched project."""

    def __init__(
        self,
        settings: Settings,
        *,
        open_sink: Callable[[], Sink] | None = None,
        read_route: ReadRoute = _read_route,
        facts: Callable[["Runtime"], JSON] | None = None,
    ) -> None:
        """`facts()` returns the fields of `Status` to report to the store. `open_sink`, `read_route` are for tests."""
        self.settings = settings
        self._remote = waits_for_network(settings.store)
        self.shadow = Shadow(self)
        self.pins = Pins()
        # Not `self.shadow.offer` itself: a forked child has another shadow.
        self.recorder = Recorder(
            settings,
            open_sink=open_sink,
            on_tick=self._tick,
            on_shadow=lambda call, info: self.shadow.offer(call, info),
        )
        self.matches = compile_match(settings.match)
        self.not_routed: Counter[str] = Counter()
        self.engine_clients = EngineClients()
        self.degraded: dict[str, str] = {}
        self._facts = facts
        self._reported: tuple[float, JSON] = (float("-inf"), {})
        self._read_route = read_route
        self._refreshed_at = self._polled_at = float("-inf")
        unknown = NOT_READ_YET if self._remote and settings.mode == "route" else None
        self.target = Target(mode=settings.mode, champion=None, base_url=None, unknown=unknown)
        self.start_breaker()
        if self._remote:
            self.recorder.ensure_running()
        else:
            self.poll()
        _alive.add(self)

    def wants(self, body: Mapping[str, Any]) -> bool:
        """Return whether a call with this request body is recorded."""
        self.ensure_running()
        return self.target.mode != "off" and (self.matches is None or self.matches(body))

    def ensure_running(self) -> None:
        """Start the recorder's thread if it does not run. The thread also polls the route."""
        # The thread starts with the first call of an app, and again in a forked child. Nothing polls before that, so
        # the call polls itself. Otherwise it would follow the route of the moment of `patch()`, which may be hours ago.
        if self.recorder.running:
            return
        if not self._remote and time.monotonic() - self._polled_at >= self.settings.poll_interval_s:
            self.poll()
        self.recorder.ensure_running()

    def count_not_routed(self, reason: str) -> None:
        """Count a call that no policy can answer."""
        with self._lock:
            # A reason may name a field of the request, so there may be any number of them.
            kept = reason in self.not_routed or len(self.not_routed) < 50
            self.not_routed[reason if kept else "other reasons"] += 1

    def began(self, call: object) -> None:
        """Note that a call has been sent to the engine; if it waits for long, the engine's health is checked."""
        self._waiting[id(call)] = time.monotonic()

    def ended(self, call: object) -> None:
        """Note that a call has its answer from the engine, or has failed."""
        self._waiting.pop(id(call), None)

    def stop(self, timeout_s: float) -> None:
        """Stop the background calls of `Shadow`, and write the queued records within `timeout_s`."""
        self.shadow.stop()
        self.recorder.stop(timeout_s)

    def start_breaker(self) -> None:
        """Make new, closed circuit breakers and a new lock, for a new engine or in a forked child."""
        self._lock = threading.RLock()
        self.breaker, self.challenger_breaker = Breaker(), Breaker(of="challenger")
        # `id` of a call -> when its attempt began (monotonic clock), while the call waits for the engine.
        self._waiting: dict[int, float] = {}
        # How many calls the engine may get at once from this process, and until when (monotonic clock) it gets none.
        self._room, self._full_until = FIRST_ROOM, float("-inf")
        self._felt_at = float("-inf")
        self._was_dead = False
        self.in_doubt = False  # whether a call ended in a way that does not tell if the engine is there

    def poll(self) -> None:
        """Compute the target from the route in the store; without a readable route the target stays as it is."""
        self._polled_at = time.monotonic()
        try:
            route = self._read_route(self.settings.store_url, self.settings.project)
            target, refused = resolve(self.settings, route)
        except Exception as error:
            faults.trouble("route.read", error)
            self.degraded["route"] = f"The route cannot be read ({type(error).__name__}); the last known one is used."
            return
        if refused is None:
            self.degraded.pop("route", None)
        else:
            faults.trouble("route.key", refused)
            self.degraded["route"] = f"The engine is not asked: {refused}."
        if target != self.target:
            route_turned(self.target, target)
            self.pins.turned(self.target, target)
            if target.challenger != self.target.challenger:
                self.challenger_breaker = Breaker(of="challenger")
            if (target.base_url, target.engine_since) != (self.target.base_url, self.target.engine_since):
                self.start_breaker()  # another engine has not failed yet
            self.target = target

    def _tick(self) -> None:
        self.poll()
        self._check_health(time.monotonic())
        self.report()

    def report(self) -> None:
        """Queue a report for `art-patch status`: at most every 10 s if the status changed, else every 60 s.

        At once if what was changed is what the app follows: somebody may wait for it (`--wait`).
        """
        if self._facts is None:
            return
        from art_patch.types import AppReport  # making the class costs `patch()` a millisecond

        now, shares = time.monotonic(), {name: getattr(self.target, name) for name in SHARES}
        since = {name: its.open_since for name, its in self._breakers().items() if not its.closed}
        facts = {**self._facts(self), **shares, "breakers_open_since": since}
        reported_at, reported = self._reported
        wait_s = REPORT_AT_LEAST_EVERY_S if facts == reported else REPORT_EVERY_S
        if now - reported_at < wait_s and all(facts.get(name) == reported.get(name) for name in FOLLOWED):
            return
        self._reported = (now, facts)
        report = {**facts, "art_patch": __version__}
        self.recorder.put_record(AppReport(f"{_HOST}:{os.getpid()}", time.time(), report))

    def _check_health(self, now: float) -> None:
        """Open the breaker if callers wait for an engine that does not answer its health check."""
        # `list` copies in one step, while callers add and remove entries.
        since = min(list(self._waiting.values()), default=now)
        in_doubt = self.in_doubt or not self.breaker.closed or now - since > self.settings.first_token_timeout_s
        if not in_doubt or self.target.base_url is None or now - self._felt_at < HEALTH_CHECK_EVERY_S:
            return
        self._felt_at, self.in_doubt = now, False
        alive = is_alive(self.target.base_url)
        now = time.monotonic()  # the health check took up to a second
        with self._lock:
            if not alive:
                self.breaker.trip(now)
            elif self._was_dead:
                self.breaker.released(now)
        self._was_dead = not alive

    def refreshed(self) -> Target:
        """Return the target; a store on this machine is read again if the last such read is over a second ago."""
        now = time.monotonic()
        if now - self._refreshed_at >= REFRESH_EVERY_S and not self._remote:
            self._refreshed_at = now
            self.poll()
        return self.target

    def has_room(self) -> bool:
        """Return whether the engine may have room for one more call of this process."""
        # A call that the engine refuses costs both processes work, so a crowd of callers does not ask one by one.
        return len(self._waiting) < self._room and time.monotonic() >= self._full_until

    def engine_full(self, pause_s: float) -> None:
        """Note that the engine had no room for a call besides those that wait, and may have in `pause_s` seconds."""
        self._room, self._full_until = max(1, len(self._waiting)), time.monotonic() + pause_s

    def allows(self, *, challenger: bool = False) -> bool:
        """Return whether the circuit breakers let a call go to the engine."""
        # Without the lock: this is the path of nearly every call.
        if self.breaker.closed and (not challenger or self.challenger_breaker.closed):
            return True
        with self._lock:
            now = time.monotonic()
            # The challenger has its own breaker besides the engine's, so that its failures do not stop the champion.
            if challenger and not self.challenger_breaker.allow(now):
                return False
            may_go = self.breaker.allow(now)
            if challenger and not may_go:
                # The call was to be the probe of the challenger's breaker, but it does not go out. The next one may be.
                self.challenger_breaker.released(now)
            return may_go

    def engine_answered(self, *, challenger: bool = False) -> None:
        """Tell the circuit breakers that the engine answered a call."""
        if 2 * len(self._waiting) >= self._room and time.monotonic() >= self._full_until:
            self._room += 1  # only if calls need it, so that the next crowd is not much larger than the last one
        for breaker in self._not_closed(challenger):
            with self._lock:
                breaker.succeeded()

    def engine_failed(self, *, challenger: bool = False) -> None:
        """Tell the circuit breakers that a call to the engine failed."""
        with self._lock:
            now = time.monotonic()
            if challenger:
                self.challenger_breaker.failed(now)
                self.breaker.released(now)  # only calls to the champion say whether the engine works
            else:
                self.breaker.failed(now)

    def engine_released(self, *, challenger: bool = False) -> None:
        """Tell the circuit breakers that a call ended, and that its end does not show whether the engine works."""
        for breaker in self._not_closed(challenger):
            with self._lock:
                breaker.released(time.monotonic())

    def _breakers(self) -> dict[str, Breaker]:
        return {"engine": self.breaker, "challenger": self.challenger_breaker}

    def _not_closed(self, challenger: bool) -> list[Breaker]:
        breakers = (self.breaker, self.challenger_breaker) if challenger else (self.breaker,)
        return [breaker for breaker in breakers if not breaker.closed]

    def facts(self) -> dict[str, Any]:
        """Return the fields of `Status` that come from the target, the recorder and the background calls."""
        recorder, target, shadow = self.recorder, self.target, self.shadow
        of_target = ("mode", "champion", "challenger", "challenger_state", "base_url")
        of_counts = ("recorded", "served_by_policy", "fallbacks", "engine_full")
        return {
            **{name: getattr(target, name) for name in of_target},
            **{name: getattr(recorder.counts, name) for name in of_counts},
            "dropped": recorder.dropped,
            "queued": recorder.account.unfinished,
            "open_breakers": tuple(name for name, its in self._breakers().items() if not its.closed),
            "not_routed": dict(self.not_routed),
            "shadowed": shadow.asked,
            "shadow_skipped": shadow.skipped,
            "shadow_failed": shadow.failed,
        }

    def sentences(self) -> tuple[str, ...]:
        """Return one sentence for each thing that does not work right now, for `status().degraded`."""
        found = list(self.degraded.values())
        if self.recorder.trouble is not None:
            found.append(f"The store cannot be written ({self.recorder.trouble}); calls wait until it can.")
        if self.recorder.losses:
            found.append(f"{self.recorder.losses}.")
        if not self.breaker.closed:
            found.append("The engine failed repeatedly; calls go upstream until it recovers.")
        if not self.challenger_breaker.closed:
            found.append(f"{self.target.challenger} failed repeatedly; calls meant for it go upstream for now.")
        return tuple(found)


_alive: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork() -> None:
    for runtime in list(_alive):
        # A lock that another thread held at the fork would stay held in the child for ever.
        runtime.start_breaker()
        # The SDK looks after the sockets that it inherits. Clients with pools of our own are made anew.
        runtime.engine_clients = EngineClients()
        runtime.shadow = Shadow(runtime)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
