"""Reads what the store says into a page of metrics, without any text of users; the store's errors are raised."""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args

from art_patch import pipeline, recording, serving, trajectories, types
from art_patch._lib.version import __version__
from art_patch.errors import ArtPatchError
from art_patch.metrics.apps import add_app
from art_patch.metrics.catalogue import Page
from art_patch.settings import Settings
from art_patch.store import APPS_LIVE_S, Store

RECENT_S = 86_400.0

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
