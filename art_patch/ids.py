"""Ids: uuid7 as 32 hex digits, so that keys sort by time and rows land next to each other in the index."""

from __future__ import annotations

from uuid_utils import uuid7


def new_id(at: float | None = None) -> str:
    """Return a uuid7 for the moment `at` (seconds since the epoch, now unless given)."""
    # A float holds today's time to a quarter of a microsecond; without rounding, 1.001 s would be millisecond 0.
    return uuid7(nanoseconds=None if at is None else round(max(at, 0.0) * 1e6) * 1_000).hex
