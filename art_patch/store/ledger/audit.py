"""The audit log: who decided what, each entry chained to the one before it by its hash, so that none can go missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from art_patch.store.backends.locks import decide_alone
from art_patch.store.schema import tables
from art_patch.types import JSON

GENESIS = "0" * 64
"""`previous` of the first audit entry."""


def audit_hash(previous: str, at: float, who: str, action: str, detail: Mapping[str, Any]) -> str:
    """Return the sha256 that chains an audit entry to the one before it."""
    body = json.dumps([previous, at, who, action, dict(detail)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body.encode()).hexdigest()


def note(connection: Connection, who: str, action: str, detail: JSON, at: float) -> None:
    """Add an entry to the audit log, chained to the one before it."""
    table = tables.audit
    decide_alone(connection)  # or two entries follow the same one
    ours = table.c.project_id == connection.get_execution_options()["project_id"]  # each project has a chain of its own
    previous = connection.scalar(select(table.c.hash).where(ours).order_by(table.c.id.desc()).limit(1)) or GENESIS
    digest = audit_hash(previous, at, who, action, detail)
    row = {"at": at, "who": who, "action": action, "detail": dict(detail), "previous": previous, "hash": digest}
    connection.execute(insert(table).values(row))
