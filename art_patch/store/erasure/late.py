"""Keeps out what an app recorded before an erasure and writes after it.

A process holds its calls for a moment, and for as long as the store is down, in its memory and in its spool; no
erasure reaches them there. So each erasure leaves an entry in the audit log, and a writer drops the records of that
user, session or trajectory that are older than the entry. The check is inside the writer's transaction: a record is
written before the entry, and then the erasure deletes it, or after the entry, and then it is dropped.
"""

import hashlib
import math
from collections.abc import Callable, Container, Sequence

from sqlalchemy import Connection, select

from art_patch.store.schema import tables
from art_patch.types import Call, Record, SpanInfo, TrajectoryInfo

_A = tables.audit.c
_NEWEST = select(_A.at).where(_A.action == "erase").order_by(_A.id.desc()).limit(1)
_SINCE = select(_A.detail, _A.at).where(_A.action == "erase").order_by(_A.id)


def subject_of(what: str, value: str) -> dict[str, str]:
    """Name a user, session or trajectory in the audit log, which outlives the data: by a hash."""
    return {"what": what, "sha256": hashlib.sha256(value.encode()).hexdigest()}


def last_erasure(connection: Connection) -> float:
    """Return when the newest erasure began; 0 if there was none."""
    return connection.scalar(_NEWEST) or 0.0


def made_at(record: Record) -> float:
    """Return when the data of a record is from; infinity if it does not say so in a number."""
    at = record.started_at if isinstance(record, Call | TrajectoryInfo | SpanInfo) else record.at
    # A file of the spool may hold anything.
    return float(at) if isinstance(at, int | float) else math.inf  # pyright: ignore[reportUnnecessaryIsInstance]


def without_erased(
    connection: Connection,
    records: Sequence[Record],
    known: Callable[[str], TrajectoryInfo | None],
    announced: Container[str],
) -> list[Record]:
    """Return the records without those that an erasure after them concerns.

    Args:
        known: returns what is known of a trajectory that is not among the records.
        announced: ids of trajectories that were written since the erasure. These go on, as do those with a newer record
            here, so their descriptions stay, although they began before it.
    """
    since = min(map(made_at, records))
    erased = {(its["what"], its["sha256"]): at for its, at in connection.execute(_SINCE.where(_A.at > since))}
    about = {record.id: record for record in records if isinstance(record, TrajectoryInfo)}

    def stays(record: Record) -> bool:
        key = _trajectory(record)
        info = key and (about.get(key) or known(key))
        whose = [("trajectory", key), *((("user", info.user_id), ("session", info.session_id)) if info else ())]
        times = (erased.get((what, subject_of(what, value)["sha256"]), 0.0) for what, value in whose if value)
        return made_at(record) >= max(times, default=0.0)

    kept = list(map(stays, records))
    goes_on = {_trajectory(record) for record, is_kept in zip(records, kept, strict=True) if is_kept}
    return [
        record
        for record, is_kept in zip(records, kept, strict=True)
        if is_kept or (isinstance(record, TrajectoryInfo) and (record.id in goes_on or record.id in announced))
    ]


def _trajectory(record: Record) -> str | None:
    return record.id if isinstance(record, TrajectoryInfo) else getattr(record, "trajectory_id", None)
