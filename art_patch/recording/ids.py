"""Ids: uuid7 as 32 hex digits, so that keys sort by time and rows land next to each other in the index.

The 12 bits after the milliseconds hold the fraction of the millisecond (RFC 9562, method 3); 62 bits are random.
"""

from __future__ import annotations

import os
import time


def new_id(at: float | None = None) -> str:
    """Return a uuid7 for the moment `at` (seconds since the epoch, now unless given)."""
    nanoseconds = time.time_ns() if at is None else int(at * 1e9)
    milliseconds, rest = divmod(max(nanoseconds, 0), 1_000_000)
    high = ((milliseconds & 0xFFFFFFFFFFFF) << 16) | 0x7000 | ((rest << 12) // 1_000_000)
    low = (int.from_bytes(os.urandom(8), "big") & 0x3FFFFFFFFFFFFFFF) | 0x8000000000000000
    return f"{high:016x}{low:016x}"
