"""Makes ids: a uuid7 as 32 hex digits. They sort by time, so rows written together are neighbours in an index."""

from hashlib import blake2b, sha256
from typing import Any, cast

from uuid_utils import uuid7


def new_id(at: float | None = None) -> str:
    """Return a new, unique id that sorts by the time `at` (seconds since the epoch); without `at` by the time now."""
    if at is None:
        return uuid7().hex
    # A float holds today's time to a quarter of a microsecond; without rounding, 1.001 s would be millisecond 0.
    return _uuid7_at(round(max(at, 0.0) * 1e6) * 1_000).hex


MOST_REPLAYS = 16  # number of re-runs that the job may make of one trajectory to get siblings, in all cycles together


def replay_id(of: str, number: int) -> str:
    """Return the id of re-run `number` (1 to `MOST_REPLAYS`) of a trajectory.

    It depends on nothing else. So no re-run is made twice, and looking up `MOST_REPLAYS` ids finds all of them.
    """
    # A trajectory's id may be any text of the user's, lone surrogates included; those have no UTF-8.
    return blake2b(f"{of}/replay/{number}".encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def derived_id(*what: str) -> str:
    """Return a hash of these strings as an id, so that what is made of the same strings again replaces the earlier."""
    return sha256("\0".join(what).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _uuid7_at(nanoseconds: int) -> Any:
    make = cast("Any", uuid7)
    try:
        return make(nanoseconds=nanoseconds)
    except TypeError:  # before 1.0, which LangChain's packages ask for
        return make(timestamp=nanoseconds // 10**9, nanos=nanoseconds % 10**9)
