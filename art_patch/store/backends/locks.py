"""PostgreSQL's advisory locks: what SQLite's one writer at a time gives for nothing.

Each lock has two numbers, as `pg_locks` shows them: `classid` is one of those below, `objid` the oid of the schema, so
that stores in two schemas of one database do not wait for each other. Both end with the transaction. Who needs both
takes the writers' lock first.
"""

from __future__ import annotations

from sqlalchemy import Connection

WRITERS = 0x41525401
"""Shared by every write transaction; whoever takes it alone (the collector, migrations) sees no write half done."""

DECISIONS = 0x41525402
"""Held by one transaction at a time that decides something: the audit chain must not fork, nor two champions serve."""

_SCHEMA = "quote_ident(current_schema())::regnamespace::oid::int"
WRITE_SHARED = f"SELECT pg_advisory_xact_lock_shared({WRITERS}, {_SCHEMA})"
WRITE_ALONE = f"SELECT pg_advisory_xact_lock({WRITERS}, {_SCHEMA})"
_DECIDE = f"SELECT pg_advisory_xact_lock({DECISIONS}, {_SCHEMA})"


def decide_alone(connection: Connection) -> None:
    """Wait until no other transaction decides, and keep others waiting until this one ends; again is free.

    Call it before the first row is changed, or two transactions may wait for each other.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_DECIDE)
