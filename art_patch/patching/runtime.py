"""The process's one patch: settings, target, recorder, breaker. Everything that `status()` tells.

The target is made anew when the store's route changes: once in `patch()`, so that the very first call is routed, then
by the recorder's thread every `poll_interval_s`. A call only reads the attribute `target`. A store behind a network is
read by that thread only, which starts with `patch()` then; until it has read it, calls go upstream and say so.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from art_patch._lib.faults import faults, logger
from art_patch._lib.forking import late_import
from art_patch.patching.rewriting.engine_request import EngineClients
from art_patch.patching.routing.engine_health import Breaker, is_alive
from art_patch.patching.routing.pins import Pins
from art_patch.patching.routing.shadow import Shadow
from art_patch.patching.routing.target import Target, resolve
from art_patch.patching.sdk.surfaces import compile_match
from art_patch.recording import Recorder, Sink
from art_patch.settings import Settings
from art_patch.store import of_another_project, waits_for_network
from art_patch.types import Route

if TYPE_CHECKING:
    from art_patch.types import Call, TrajectoryInfo

REFRESH_EVERY_S = 1.0
HEALTH_CHECK_EVERY_S = 2.0
FOREIGN_EVERY_S = 30.0
"""How often a store that belongs to another project is looked at: on a server each look is a connection."""

NOT_READ_YET = "the store's server has not told yet who serves"

ReadRoute = Callable[[str], Route]


def _read_route(url: str) -> Route:
    with late_import():  # the recorder's thread is the first to ask a store behind a network
        from art_patch.store import read_route
    return read_route(url)


class Runtime:
    """What the wrappers work with."""

    def __init__(
        self,
        settings: Settings,
        *,
        open_sink: Callable[[], Sink] | None = None,
        read_route: ReadRoute = _read_route,
        on_tick: Callable[[Runtime], None] | None = None,
    ) -> None:
        """Read the route once, or have it read. `on_tick` is called by the recorder's thread now and then."""
        self.settings = settings
        self._remote = waits_for_network(settings.store)
        self.shadow = Shadow(self)
        self.pins = Pins()
        self.recorder = Recorder(settings, open_sink=open_sink, on_tick=self._tick, on_shadow=self._on_shadow)
        self.matches = compile_match(settings.match)
        self.engine_clients = EngineClients()
        self.degraded: dict[str, str] = {}
        self._on_tick = on_tick
        self._read_route = read_route
        self._route = Route()
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
        """Whether a call is ours, by its body."""
        self.ensure_running()
        return self.target.mode != "off" and (self.matches is None or self.matches(body))

    def ensure_running(self) -> None:
        """Have the recorder's thread run, for a call that begins.

        It starts with an app's first call, also in a forked child, and nobody looks at the store before: then the call
        itself does, or it would go where calls went when the app was patched, hours ago maybe.
        """
        if self.recorder.running:
            return
        if not self._remote and time.monotonic() - self._polled_at >= self.settings.poll_interval_s:
            self.poll()
        self.recorder.ensure_running()

    def began(self, call: object) -> None:
        """A call waits for the engine."""
        self._waiting[id(call)] = time.monotonic()

    def ended(self, call: object) -> None:
        """It waits no more."""
        self._waiting.pop(id(call), None)

    def stop(self, timeout_s: float) -> None:
        """Ask nothing in the background any more, and write what is queued."""
        self.shadow.stop()
        self.recorder.stop(timeout_s)

    def start_breaker(self) -> None:
        """Begin with a closed breaker and a free lock; also in a forked child."""
        self._lock = threading.RLock()
        self.breaker = Breaker()
        self.challenger_breaker = Breaker()
        self._waiting: dict[int, float] = {}
        self._felt_at = float("-inf")
        self._was_dead = False

    def poll(self) -> None:
        """Take over what the store says; keep the last known target if it cannot be read."""
        self._polled_at = time.monotonic()
        try:
            self._route = self._read_route(self.settings.store_url)
            target, refused = self._stay_out(self._route.project) or resolve(self.settings, self._route)
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
            self.pins.turned(self.target, target)
            if target.challenger != self.target.challenger:
                self.challenger_breaker = Breaker()
            if (target.base_url, target.engine_since) != (self.target.base_url, self.target.engine_since):
                self.start_breaker()  # another engine has not failed yet
            self.target = target

    def _stay_out(self, owner: str | None) -> tuple[Target, None] | None:
        """Return a target that leaves all calls alone if the store is another project's, and say so once."""
        if owner in (None, self.settings.project):
            self.degraded.pop("project", None)
            return None
        sentence = of_another_project(self.settings.store_url, str(owner), self.settings.project)
        if "project" not in self.degraded:
            self.degraded["project"] = f"Calls are neither recorded nor routed: {sentence}."
            logger.warning("art_patch: calls are neither recorded nor routed: %s", sentence)
        return Target(mode="off", champion=None, base_url=None), None

    def _tick(self) -> None:
        if "project" in self.degraded and time.monotonic() - self._polled_at < FOREIGN_EVERY_S:
            return
        self.poll()
        if "project" in self.degraded:
            return  # nothing of ours belongs into that store, the report of this process neither
        self._check_health(time.monotonic())
        if self._on_tick is not None:
            self._on_tick(self)

    def _check_health(self, now: float) -> None:
        """Open the breaker if callers wait for an engine that is not there; see `health check`."""
        since = min(list(self._waiting.values()), default=now)
        in_doubt = not self.breaker.closed or now - since > self.settings.first_token_timeout_s
        if not in_doubt or self.target.base_url is None or now - self._felt_at < HEALTH_CHECK_EVERY_S:
            return
        self._felt_at = now
        alive = is_alive(self.target.base_url)
        with self._lock:
            if not alive:
                self.breaker.trip(time.monotonic())
            elif self._was_dead:
                self.breaker.released(time.monotonic())
        self._was_dead = not alive

    def refreshed(self) -> Target:
        """Return the target after a look at the store, at most one look a second; a caller waits for no network."""
        now = time.monotonic()
        if now - self._refreshed_at >= REFRESH_EVERY_S and not self._remote:
            self._refreshed_at = now
            self.poll()
        return self.target

    def _on_shadow(self, call: Call, info: TrajectoryInfo) -> None:
        self.shadow.offer(call, info)

    def allows(self, *, challenger: bool = False) -> bool:
        """Whether the breakers let a call go to the engine.

        The challenger has a breaker of its own besides: what fails with it must not keep calls from the champion.
        """
        if self.breaker.closed and (not challenger or self.challenger_breaker.closed):
            return True
        with self._lock:
            now = time.monotonic()
            if challenger and not self.challenger_breaker.allow(now):
                return False
            if self.breaker.allow(now):
                return True
            if challenger:
                self.challenger_breaker.released(now)
            return False

    def engine_answered(self, *, challenger: bool = False) -> None:
        """The engine did its work."""
        for breaker in self._breakers(challenger):
            if not breaker.closed:
                with self._lock:
                    breaker.succeeded()

    def engine_failed(self, *, challenger: bool = False) -> None:
        """The engine failed a call."""
        with self._lock:
            now = time.monotonic()
            if challenger:
                self.challenger_breaker.failed(now)
                self.breaker.released(now)  # whether the engine is well, the champion's calls tell
            else:
                self.breaker.failed(now)

    def engine_released(self, *, challenger: bool = False) -> None:
        """A call to the engine ended without telling anything about the engine."""
        for breaker in self._breakers(challenger):
            if not breaker.closed:
                with self._lock:
                    breaker.released(time.monotonic())

    def _breakers(self, challenger: bool) -> tuple[Breaker, ...]:
        return (self.breaker, self.challenger_breaker) if challenger else (self.breaker,)

    def sentences(self) -> tuple[str, ...]:
        """Return what does not work right now, in plain sentences."""
        found = list(self.degraded.values())
        if self.recorder.trouble is not None:
            found.append(f"The store cannot be written ({self.recorder.trouble}); calls wait in memory.")
        if self.recorder.losses and "project" not in self.degraded:  # which says why
            found.append(f"{self.recorder.losses}.")
        if not self.breaker.closed:
            found.append("The engine failed repeatedly; calls go upstream until it recovers.")
        if not self.challenger_breaker.closed:
            found.append(f"{self.target.challenger} failed repeatedly; calls meant for it go upstream for now.")
        return tuple(found)


_alive: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork() -> None:
    for runtime in list(_alive):
        runtime.start_breaker()
        # Sockets of the parent's pools are the SDK's affair; our own pools are made anew.
        runtime.engine_clients = EngineClients()
        runtime.shadow = Shadow(runtime)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
