"""The page on the store and the system, and its parts that take long: sizes, the engine, and what the doctor finds.

A part is a page of its own, which the first page loads into itself, so that it is fast while an engine is down.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from pydantic import Field

from art_patch import doctor, insights, store
from art_patch._lib.version import __version__
from art_patch.types import JSON
from art_patch.web.projects import Asked, Query

_LISTED = 20
_ENTRIES = 30
_DAY_S = 86_400.0
_RATE_DAYS = 7
_GROWTH_DAYS = 30
_SIZE_S = 600.0  # SQLite reads the whole file for it
_ENGINE_S = 3.0
_DOCTOR_S = 300.0  # the engine answers two short questions for it
_PACKAGES = ("openai", "sqlalchemy", "psycopg", "starlette", "litellm", "torch", "transformers", "peft")
_TAKEN_AWAY = ("erase", "erased", "prune")


class SystemQuery(Query):
    """Which part of the audit log is shown."""

    before: int | None = Field(None, ge=1, le=2**31 - 1, description="Number of the last entry of the page before.")


def facts(asked: Asked) -> JSON:
    """Return the facts that are known at once."""
    opened, settings, given = asked.store, asked.settings, asked.project.given
    entries = opened.audit.entries(before=asked.query.before, limit=_ENTRIES + 1)
    route = opened.ledger.route()
    return {
        "store": store.without_password(settings.store_url),
        "database": "PostgreSQL" if store.is_postgres(settings.store_url) else "SQLite",
        "retention": {"keep_days": settings.keep_days, "keep_trajectories": settings.keep_trajectories},
        "taken_away": [asdict(each) for each in opened.audit.entries(actions=_TAKEN_AWAY, limit=_LISTED)],
        "exports": [asdict(each) for each in opened.transfers.exports(limit=_LISTED)],
        "notifications": _notified(settings.notify),
        "versions": _versions(),
        "settings": insights.settings_in_force(
            settings, given.arguments, os.environ, env_file=given.env_file, mode=route.mode
        ),
        "audit": [asdict(each) for each in entries[:_ENTRIES]],
        "before": entries[_ENTRIES - 1].id if len(entries) > _ENTRIES else None,  # of the next page
    }


def size(asked: Asked) -> JSON:
    """Return how fast the store grows, and how large it is if no other project is in it."""
    return asked.project.kept("size of the store", _SIZE_S, lambda: _size(asked.store, asked.now))


def engine(asked: Asked) -> JSON:
    """Return the engine and all servers as they answer now."""
    return asked.project.kept("engines", _ENGINE_S, lambda: insights.engines(asked.settings, asked.store))


_DOCTOR = "doctor"


def examined(asked: Asked) -> JSON:
    """Return what the doctor finds."""
    return asked.project.kept(_DOCTOR, _DOCTOR_S, lambda: _examine(asked))


def examined_before(asked: Asked) -> JSON | None:
    """Return what the doctor found lately; `None` until it has looked once, which this begins."""
    return asked.project.kept_later(_DOCTOR, _DOCTOR_S, lambda: _examine(asked))


def _examine(asked: Asked) -> JSON:
    given = asked.project.given
    found, _ = doctor.examine(asked.settings, given.arguments, of_options=given.of_options)
    return {"healthy": all(one.level != "bad" for one in found), "findings": [asdict(one) for one in found]}


def _size(opened: store.Store, now: float) -> JSON:
    stats = asdict(opened.maintain.stats())
    since = max(now - _RATE_DAYS * _DAY_S, opened.changes.first_call_at() or 0.0)  # of this project
    (calls,) = opened.series.written((since, now))
    whole, all_calls = stats["bytes"] + stats["wal_bytes"], stats["tables"]["calls"]["rows"]
    # An hour tells little of a day, so the first day counts as a whole one.
    a_day = calls / max((now - since) / _DAY_S, 1.0)
    stats["rate_days"] = (now - since) / _DAY_S
    stats["calls_a_day"] = a_day
    stats["bytes_a_day"] = a_day * whole / all_calls if all_calls else None
    stats["growth"] = _growth(opened, now, whole / all_calls) if all_calls else []
    if stats["projects"] > 1:  # who sees one project is told nothing of the others
        hidden = (
            "bytes", "wal_bytes", "free_bytes", "tables", "trajectories", "projects", "first_call_at", "last_call_at",
        )  # fmt: skip
        stats |= dict.fromkeys(hidden)
    return stats


def _growth(opened: store.Store, now: float, bytes_a_call: float) -> list[JSON]:
    """Return how many calls came in each of the last days, and about how large all calls were at its end, oldest first.

    Sizes of the past are on no record: each call that is still there counts with what a call takes on average. A store
    that is younger is shown since its first call.
    """
    first = opened.changes.first_call_at()
    step_s = min(_DAY_S, (now - (now if first is None else first) + 1.0) / _GROWTH_DAYS)
    bounds = [now - step_s * back for back in range(_GROWTH_DAYS, -1, -1)]
    before, *calls = opened.series.written((0.0, *bounds))
    sums = accumulate(calls, initial=before)
    next(sums)
    return [
        {"since": since, "until": until, "calls": count, "bytes": round(all_calls * bytes_a_call)}
        for (since, until), count, all_calls in zip(pairwise(bounds), calls, sums, strict=True)
    ]


def _notified(notify: str | None) -> list[str]:
    """Return the kinds of addresses that are told of decisions, such as `slack`; the rest of an address is secret."""
    return [kind for address in (notify or "").split() for kind, found, _ in [address.partition("://")] if found]


@cache
def _versions() -> dict[str, Any]:
    found = {name: doctor.installed_version(name) for name in _PACKAGES}
    own = {"art_patch": __version__, "schema of the store": store.HEAD, "Python": platform.python_version()}
    return own | {name: version for name, version in found.items() if version}
