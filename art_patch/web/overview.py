"""The first page: who serves, how well over time, what is used, what waits, and which apps are connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from pydantic import Field

from art_patch import insights, promotion
from art_patch.store import Store, Totals
from art_patch.types import JSON
from art_patch.web import cycles
from art_patch.web.policies import shown_moves
from art_patch.web.projects import Asked, Query
from art_patch.web.system import examined_before

_DAY_S = 86_400.0
_FRESH_S = 0.5  # counts over the whole store may be as old, or as they took
_RECENT_S = 120.0  # calls that began lately are counted for each page, and those before less often
_BEFORE_S = 30.0
_MONEY_S = 600.0
_MONEY_DAYS = 7  # as `art-patch report`
_PAST_S = 600.0  # numbers of a period that is over: only late feedback changes them
_STEPS_S = (60.0, 300.0, 900.0, 3_600.0)  # of a young project, the shortest that gives at most so many periods
_MOST_PERIODS = 40

SERIES = ("success", "reward", "calls", "latency_ms", "tokens")
"""What is shown over time, by policy."""


class OverviewQuery(Query):
    """How much of the past is shown."""

    days: int = Field(14, ge=1, le=90, description="Number of days, with today.")


def facts(asked: Asked) -> JSON:
    """Return the page's facts."""
    store, settings, kept, kept_later = asked.store, asked.settings, asked.project.kept, asked.project.kept_later
    periods, served = _periods(asked), insights.who_serves(settings, store, now=asked.now)
    return {
        **served,
        "history": shown_moves(served["history"]),
        "has_engine": (settings.base_url or store.ledger.route().base_url) is not None,
        "control": None if served["control_look"] is None else promotion.look_in_words(served["control_look"]),
        "recorded": _recorded(asked),
        "queue": {name: sum(_whole(app.get(name)) for app in served["apps"]) for name in ("queued", "dropped")},
        "cycle": cycles.running(asked),
        "waits": insights.waits_for(settings, store),
        "approvals": _approvals(store),
        "doctor": _faults(asked),
        "periods": periods,
        "series": {name: _series(periods, name) for name in SERIES},
        "shares": _shares(periods, served["challenger"]),
        "money": kept_later("money", _MONEY_S, lambda: _money(asked)),
        "promotions": [asdict(each) for each in kept("promotions", _FRESH_S, store.series.promotions)],
    }


def _recorded(asked: Asked) -> JSON:
    """Return how much was recorded. Calls that are written minutes after they began are counted some seconds late."""
    series, kept = asked.store.series, asked.project.kept

    def before() -> tuple[float, Totals]:
        until = time.time() - _RECENT_S
        return until, series.totals(until=until)

    until, older = kept("totals before", _BEFORE_S, before)
    return asdict(older + series.totals(since=until))


def _whole(value: Any) -> int:
    # An app of another release wrote it.
    return value if isinstance(value, int) else 0


def _shares(periods: Sequence[JSON], tested: JSON | None) -> JSON:
    """Return who answered the calls of these periods; without copies, except in `copies`."""
    answered = [each for period in periods for each in period["answered"]]

    def calls(policies: Callable[[str | None], bool]) -> int:
        return sum(each["calls"] for each in answered if policies(each["policy"]))

    name = tested["policy"] if tested is not None and tested["state"] == "canary" else None
    return {
        "calls": calls(lambda _: True),
        "routed": calls(lambda policy: policy is not None),
        "canary": None if name is None else calls(lambda policy: policy == name),
        "fell_back": sum(period["fell_back"] for period in periods),
        "copies": sum(period["copies"] for period in periods),
    }


def _money(asked: Asked) -> JSON:
    """Return what `art-patch report` says about costs and savings; an amount that is not known is `None`."""
    given, since = asked.project.given, asked.now - _MONEY_DAYS * _DAY_S
    spent = asked.store.reports.spent(since=since, until=asked.now)
    money = insights.count_money(spent, given.prices, gpu_usd_per_hour=given.gpu_usd_per_hour)
    return {"since": since, "until": asked.now, "days": _MONEY_DAYS, **money.as_facts()}


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
    if found is None:
        return None
    return [one for level in ("bad", "warn") for one in found["findings"] if one["level"] == level]


def _periods(asked: Asked) -> list[JSON]:
    """Return the numbers of each day, oldest first; of shorter periods where all was recorded within few days."""
    today = datetime.fromtimestamp(asked.now).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [(today + timedelta(days=back)).timestamp() for back in range(1 - asked.query.days, 2)]
    first = asked.store.changes.first_call_at() or asked.now
    step_s = next((each for each in _STEPS_S if (asked.now - first) / each <= _MOST_PERIODS), None)
    if step_s is None or first < days[0]:
        return [_period(asked, bounds, "%Y-%m-%d") for bounds in pairwise(days)]
    begin = first - first % step_s
    moments = [begin + step_s * number for number in range(int((asked.now - begin) / step_s) + 2)]
    return [_period(asked, bounds, "%m-%d %H:%M") for bounds in pairwise(moments)]


def _period(asked: Asked, bounds: tuple[float, float], name: str) -> JSON:
    fresh_s = _PAST_S if bounds[1] < asked.now - 60 else _FRESH_S
    (found,) = asked.project.kept(f"period {bounds}", fresh_s, lambda: asked.store.series.days(bounds))
    return {"name": f"{datetime.fromtimestamp(bounds[0]):{name}}", **asdict(found)}


def _series(periods: list[JSON], name: str) -> dict[str, list[float | None]]:
    """Return a number of each policy, and of upstream, by period; `None` where it answered nothing."""
    its = [{each["policy"] or "upstream": each for each in period["answered"]} for period in periods]
    policies = sorted({policy for each in its for policy in each})

    def value(one: JSON | None) -> float | None:
        if one is None:
            return None
        if name == "success":
            return one["succeeded"] / one["known"] if one["known"] else None
        if name == "tokens":
            return one["prompt_tokens"] + one["completion_tokens"]
        return one[name]

    return {policy: [value(each.get(policy)) for each in its] for policy in policies}
