"""What stands in `trainings` for a run that a policy learned from outside of any group that it was trained on."""

from __future__ import annotations

import hashlib


def run_key(trajectory_id: str) -> str:
    """Return its key: a hash, because apps choose ids, and lineage outlives data."""
    return "run:" + hashlib.blake2b(trajectory_id.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
