"""Which part of the traffic: a share chosen by a hash, so that every process chooses alike and nothing flips midway."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

Purpose = Literal["sample", "canary", "shadow", "challenger"]


def in_share(key: str, share: float, purpose: Purpose) -> bool:
    """Whether `key` is among the `share` (0..1) of all keys.

    The purpose is hashed along: otherwise the few that are recorded would be the very ones that the canary serves.
    """
    if share >= 1:
        return True
    if share <= 0:
        return False
    digest = blake2b(f"{purpose}:{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
