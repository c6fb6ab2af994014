"""Reads what the store says into a page of metrics, without any text of users.

`gather` reads it once, and raises the store's errors. `StoreWatch` reads it for a server, in a thread of its own, so
that neither a scrape nor a call waits for it. It looks at the route every `ROUTE_S` seconds, and at all else every
`EVERY_S` seconds at most: after a read that took long, it rests `_REST` times as long. While the store cannot be read,
the page says nothing of it but how long.
"""

import sqlite3
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from logging import getLogger
from threading import Event, Thread
from typing import Any, get_args

from art_patch import pipeline, recording, serving, trajectories, types
from art_patch._lib.version import __version__
from art_patch._lib.words import one_line
from art_patch.errors import ArtPatchError
from art_patch.metrics.catalogue import Page, add_app
from art_patch.settings import Settings
from art_patch.store import APPS_LIVE_S, Store, open_store

RECENT_S = 86_400.0
ROUTE_S = 1.0
EVERY_S = 15.0
_REST = 20

log = getLogger(__name__)

_COUNTS = (
    "calls", "calls_by_policy", "calls_fell_back", "calls_engine_full", "calls_not_ok", "calls_trainable",
    "calls_shadow", "calls_resampled", "trajectories", "scores",
)  # fmt: skip
_REASONS = {reason for reason, _ in trajectories.REASONS} | {
    recording.REDACTED,
    recording.MEDIA_REPLACED,
    types.IMPORTED,
}
_OF_JUDGE = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "unpriced")
_ENGINE_S = 2.0


def gather(settings: Settings, store: Store, *, now: float | None = None) -> Page:
    """Return the metrics of a project's store, of its last cycle, and whether its engine answers."""
    at = time.time() if now is None else now
    page = Page(settings.project)
    page.add("info", 1, version=__version__)
    route = store.ledger.route()
    for mode in get_args(types.Mode):  # a sample for each, so that a query over time sees a mode end
        page.add("mode", mode == (route.mode or settings.mode), mode=mode)
    _policies(page, store, route)
    _engine(page, settings, route)
    _recorded(page, store)
    _recent(page, store, at)
    _control(page, store, route)
    _cycle(page, settings)
    _apps(page, store, at)
    page.add("store_bytes", store.maintain.size())
    page.add("store_read_timestamp_seconds", at)
    return page


def _policies(page: Page, store: Store, route: types.Route) -> None:
    known = store.ledger.policies()
    for state in dict.fromkeys(("champion", *sorted(policy.state for policy in known))):
        # The champion's even if there is none: an alert has to see that it is gone.
        page.add("policies", sum(policy.state == state for policy in known), state=state)
    if route.champion is not None:
        page.add("champion_step", int(route.champion.rpartition("@")[2]), policy=route.champion)
    # Without a test the metrics are left out. A share of 0 would look like a test that no session takes part in.
    if route.challenger is not None:
        labels = {"policy": route.challenger, "state": str(route.challenger_state)}
        page.add("challenger_share", (route.challenger_percent or 0.0) / 100, **labels)
        page.add("challenger_since_timestamp_seconds", route.challenger_since, **labels)
    gated = next((policy for policy in reversed(known) if policy.metrics.get("gate")), None)
    if gated is not None:
        gate: Mapping[str, Any] = gated.metrics["gate"]
        for side in ("candidate", "champion"):
            page.add("gate_score", gate.get(side), policy=gated.name, side=side)
        page.add("gate_lower_bound", gate.get("lower_bound"), policy=gated.name)
        page.add("gate_scenarios", gate.get("scenarios"), policy=gated.name)


def _engine(page: Page, settings: Settings, route: types.Route) -> None:
    with suppress(ArtPatchError):  # its key cannot be read, or its address is not allowed: apps do not call it either
        if (engine := serving.EngineClient.of_route(settings, route)) is not None:
            page.add("engine_up", engine.health(timeout_s=_ENGINE_S))


def _recorded(page: Page, store: Store) -> None:
    recorded, deleted = store.read.counts_and_deleted()
    for name in _COUNTS:
        page.add(name, recorded[name] + deleted.get(name, 0))
    for name in _OF_JUDGE:
        page.add(f"judge_{name}", recorded["judge"][name] + deleted.get(f"judge_{name}", 0))
    for state, count in sorted(recorded["groups"].items()):
        page.add("groups", count, state=state)
    # A file that was imported may name any reason, and any policy: only our own become labels.
    reasons: Counter[str] = Counter()
    for reason, count in recorded["untrainable"].items():
        reasons[reason if reason in _REASONS else "other"] += count
    for reason, count in sorted(reasons.items()):
        page.add("calls_untrainable", count, reason=reason)
    page.add("scenarios", recorded["scenarios"])
    page.add("last_call_timestamp_seconds", recorded["last_call_at"])


def _recent(page: Page, store: Store, now: float) -> None:
    known = {None, *(policy.name for policy in store.ledger.policies())}
    for one in store.reports.recent(since=now - RECENT_S):
        if one.policy not in known:
            continue
        policy = one.policy or "upstream"
        page.add("recent_calls", one.calls, policy=policy)
        page.add("recent_calls_not_ok", one.calls_not_ok, policy=policy)
        page.add("recent_latency_mean_seconds", one.latency_ms and one.latency_ms / 1000, policy=policy)
        page.add("recent_runs", one.runs, policy=policy)
        page.add("recent_success_share", one.succeeded / one.known if one.known else None, policy=policy)
        page.add("recent_rewarded_runs", one.rewarded, policy=policy)
        page.add("recent_reward_mean", one.reward, policy=policy)


def _control(page: Page, store: Store, route: types.Route) -> None:
    page.add("control_share", route.control_percent / 100 if route.champion else 0.0)
    look: Mapping[str, Any] | None = store.ledger.control_look() if route.control_percent else None
    if look is None:
        return
    page.add("control_look_timestamp_seconds", look["at"])
    for side in ("champion", "upstream"):
        page.add("control_sessions", look[side]["sessions"], side=side)
    for name, signal in look["signals"].items():
        page.add("control_difference", signal.get("difference"), signal=name)
        page.add("control_difference_error", signal.get("error"), signal=name)


def _cycle(page: Page, settings: Settings) -> None:
    if (last := pipeline.last_retrain(settings.directory)) is not None:
        page.add("last_cycle_timestamp_seconds", last["ended_at"])
        page.add("last_cycle_exit_code", last["exit_code"])
        page.add("last_cycle_duration_seconds", last["took_s"])
        page.add("last_cycle_outcome", 1, outcome=last["outcome"])


def _apps(page: Page, store: Store, now: float) -> None:
    # With a process, its series end.
    for app in store.read.apps(since=now - APPS_LIVE_S):
        add_app(page, app.id, app.facts, at=app.at)


class StoreWatch:
    """What the store said when it was last read."""

    def __init__(self, settings: Settings) -> None:
        """Begin without a read; `start` begins to read."""
        self._settings = settings
        self.route: types.Route | None = None  # the newest that is known
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
