"""A policy's share of the sessions, its test on traffic so far, and the rewards that users and the app gave it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from art_patch import pipeline, promotion, store, types
from art_patch.insights.policy_words import time_left, time_left_in_words
from art_patch.settings import Settings


def canary_config(settings: Settings) -> promotion.CanaryConfig:
    """Return the rules of the canary test that the project's settings contain."""
    return promotion.CanaryConfig(
        min_sessions=settings.canary_sessions,
        max_hours=settings.canary_hours,
        margin=settings.canary_margin,
        max_loss=settings.max_loss,
        latency_ratio=settings.canary_latency_ratio,
        rest_s=settings.canary_rest_s,
        silence_s=settings.canary_silence_s,
        ramp=promotion.RAMP if settings.canary_ramp else (),
    )


def running_test(settings: Settings, opened: store.Store, *, now: float) -> types.JSON | None:
    """Return what `art-patch watch --once` finds, how the proofs grew, and the time left; `None` without a test."""
    config = canary_config(settings)
    report, proofs = pipeline.look_without_acting(opened, config, now=now)
    if report.challenger is None:
        return None
    left, signals = time_left(report, config), dict[str, Any](report.metrics["signals"])
    facts: dict[str, Any] = {
        "proofs": {
            name: [each._asdict() for each in path] for name, path in proofs.items() if "worse" in signals.get(name, {})
        },
        "time_left": left,
        "time_left_words": None if left is None else time_left_in_words(left),
        "at": now,
    }
    return asdict(report) | facts


def percent_of(policy: types.Policy, route: types.Route) -> float | None:
    """Return the percentage of the sessions that a policy answers, or `None` if it answers none."""
    # The champion answers all sessions that the canary does not.
    canary = (route.challenger_percent or 0.0) if route.challenger_state == "canary" else 0.0
    if policy.name == route.champion:
        return 100 - canary
    return canary if canary and policy.name == route.challenger else None


def own_rewards(opened: store.Store, *names: str, now: float) -> dict[str, dict[str, float]]:
    """Return the mean reward that users and the app gave these policies' runs of the last 28 days, and their number."""
    runs = opened.reports.usage(since=now - store.CONTROL_S, until=now).runs
    found = dict[str, dict[str, float]]()
    for name in names:
        own = [run for run in runs if (run.policy or types.UPSTREAM_ARM) == name and not run.copy]
        its = [run.reward for run in own if run.reward is not None]
        if its:
            found[name] = {"reward": sum(its) / len(its), "runs": len(its)}
    return found
