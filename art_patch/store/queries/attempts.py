"""How long updates ran that ended without a policy: they failed, were refused or interrupted, or time was up.

Each is an entry of the audit log, so that what they cost is not forgotten with the job. The update that makes the
policy in the end tells its own time in the policy's metrics, under the same job. A process that was killed leaves none.
"""

from __future__ import annotations

import time
from collections import Counter

from sqlalchemy import Connection, select

from art_patch.store.backends.database import Database
from art_patch.store.ledger.audit import note
from art_patch.store.schema import tables

_ACTION = "update ended"


def note_attempt(
    database: Database, job: str, *, policy: str, took_s: float, why: str, who: str, now: float | None = None
) -> None:
    """Leave an audit entry of an update that made no policy.

    Args:
        database: of the store.
        job: fingerprint of what was to be learned.
        policy: the name that was meant for it.
        took_s: how long it ran.
        why: what kind of error ended it.
        who: ran it.
        now: seconds since the epoch.
    """
    detail = {"job": job, "policy": policy, "took_s": took_s, "why": why}
    with database.write(durable=True) as connection:
        note(connection, who, _ACTION, detail, time.time() if now is None else now)


def attempts_s(connection: Connection, since: float, until: float) -> Counter[str]:
    """Return how long updates ran that ended within this time and made no policy then, by job."""
    table = tables.audit.c
    query = select(table.detail).where(table.action == _ACTION, table.at >= since, table.at < until)
    found: Counter[str] = Counter()
    for detail in connection.scalars(query):
        found[detail["job"]] += detail["took_s"]
    return found
