"""The first page: who serves, how well by day, what is used, what waits, and which apps are connected."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from pydantic import Field

from art_patch import insights
from art_patch.store import Store
from art_patch.types import JSON
from art_patch.web.projects import Asked, Query
from art_patch.web.system import examined_before

_FRESH_S = 5.0  # counts over the whole store may be as old
_PAST_S = 600.0  # numbers of days that are over: only late feedback changes them


class OverviewQuery(Query):
    """How much of the past is shown."""

    days: int = Field(14, ge=1, le=90, description="Number of days, with today.")


def facts(asked: Asked) -> JSON:
    """Return the page's facts."""
    store, settings, kept = asked.store, asked.settings, asked.project.kept
    days = _days(asked)
    return {
        **insights.who_serves(settings, store, now=asked.now),
        "recorded": kept("counts", _FRESH_S, store.read.counts),
        "waits": insights.waits_for(settings, store),
        "approvals": _approvals(store),
        "doctor": _faults(asked),
        "days": days,
        "policies_by_day": _by_policy(days),
        "promotions": [asdict(each) for each in kept("promotions", _FRESH_S, store.series.promotions)],
    }


def _approvals(store: Store) -> list[JSON]:
    """Return the candidates that won their gate and wait for a person, the longest first."""
    waiting = [(each, each.metrics.get("waits")) for each in store.ledger.policies() if each.state == "candidate"]
    found = [
        {"policy": each.name, "since": waits["since"], "reason": waits["reason"]} for each, waits in waiting if waits
    ]
    return sorted(found, key=lambda one: one["since"])


def _faults(asked: Asked) -> list[JSON] | None:
    """Return what the doctor found lately that is red or yellow, the red first; `None` until it has looked once."""
    found = examined_before(asked)
    return found and [one for level in ("bad", "warn") for one in found["findings"] if one["level"] == level]


def _days(asked: Asked) -> list[JSON]:
    """Return the days, oldest first, as `art-patch days` does; days begin at midnight, local time."""
    today = datetime.fromtimestamp(asked.now).replace(hour=0, minute=0, second=0, microsecond=0)
    found: list[JSON] = []
    for back in range(asked.query.days - 1, -1, -1):
        since, until = (today + timedelta(days=1 - back - step) for step in (1, 0))
        fresh_s = _FRESH_S if back == 0 else _PAST_S
        bounds = (since.timestamp(), until.timestamp())
        (day,) = asked.project.kept(f"day {since:%Y-%m-%d}", fresh_s, lambda b=bounds: _day(asked.store, b))
        found.append({"day": f"{since:%Y-%m-%d}", **asdict(day)})
    return found


def _day(store: Store, bounds: tuple[float, float]) -> Any:
    return store.series.days(bounds)


def _by_policy(days: list[JSON]) -> dict[str, JSON]:
    """Return for each policy, and upstream, its calls, reward and success by day; `None` where it answered nothing."""
    names = {each["policy"] or "upstream" for day in days for each in day["answered"]}
    found: dict[str, JSON] = {}
    for name in sorted(names):
        its = [next((e for e in day["answered"] if (e["policy"] or "upstream") == name), None) for day in days]
        found[name] = {
            "calls": [each and each["calls"] for each in its],
            "reward": [each and each["reward"] for each in its],
            "success": [each["succeeded"] / each["known"] if each and each["known"] else None for each in its],
            "latency_ms": [each and each["latency_ms"] for each in its],
        }
    return found
