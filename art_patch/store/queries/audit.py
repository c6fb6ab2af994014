"""Reads the audit log, newest entries first."""

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select

from art_patch.store.backends.database import Part
from art_patch.store.schema import tables
from art_patch.types import JSON

_A = tables.audit.c


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the audit log."""

    id: int  # counts from 1 in each project
    at: float
    who: str
    action: str
    detail: JSON


class Audit(Part):
    """Queries for the audit log."""

    def entries(
        self, *, actions: Collection[str] | None = None, before: int | None = None, limit: int = 50
    ) -> tuple[Entry, ...]:
        """Return the newest entries with ids below `before`, newest first; of these `actions` only, if given."""
        query = select(*tables.columns_of(tables.audit, Entry)).order_by(_A.id.desc()).limit(limit)
        query = query if actions is None else query.where(_A.action.in_(sorted(actions)))
        query = query if before is None else query.where(_A.id < before)
        with self._database.read() as connection:
            return tuple(Entry(*row) for row in connection.execute(query))
