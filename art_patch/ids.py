"""Ids: uuid7 as 32 hex digits, so that keys sort by time and rows land next to each other in the index."""

from __future__ import annotations

from typing import Any, cast

from uuid_utils import uuid7


def new_id(at: float | None = None) -> str:
    """Return a uuid7 for the moment `at` (seconds since the epoch, now unless given)."""
    if at is None:
        return uuid7().hex
    # A float holds today's time to a quarter of a microsecond; without rounding, 1.001 s would be millisecond 0.
    return _uuid7_at(round(max(at, 0.0) * 1e6) * 1_000).hex


def _uuid7_at(nanoseconds: int) -> Any:
    make = cast(Any, uuid7)
    try:
        return make(nanoseconds=nanoseconds)
    except TypeError:  # before 1.0, which LangChain's packages ask for
        return make(timestamp=nanoseconds // 10**9, nanos=nanoseconds % 10**9)
