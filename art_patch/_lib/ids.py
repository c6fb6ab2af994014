"""Ids: uuid7 as 32 hex digits, so that keys sort by time and rows land next to each other in the index."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, cast

from uuid_utils import uuid7


def new_id(at: float | None = None) -> str:
    """Return a uuid7 for the moment `at` (seconds since the epoch, now unless given)."""
    if at is None:
        return uuid7().hex
    # A float holds today's time to a quarter of a microsecond; without rounding, 1.001 s would be millisecond 0.
    return _uuid7_at(round(max(at, 0.0) * 1e6) * 1_000).hex


MOST_REPLAYS = 16
"""How often the job may run a trajectory again to make siblings, in all."""


def replay_id(of: str, number: int) -> str:
    """Return the id of a trajectory's re-run `number`, 1 to `MOST_REPLAYS`.

    It is always the same, so that nothing is run twice, and a re-run is found by the id of its original: a look-up of
    few keys, where every other mark would have to be searched for.
    """
    return blake2b(f"{of}/replay/{number}".encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _uuid7_at(nanoseconds: int) -> Any:
    make = cast(Any, uuid7)
    try:
        return make(nanoseconds=nanoseconds)
    except TypeError:  # before 1.0, which LangChain's packages ask for
        return make(timestamp=nanoseconds // 10**9, nanos=nanoseconds % 10**9)
