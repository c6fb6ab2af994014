"""What has changed in the store: marks of the newest rows, cheap enough for each second, and the audit log."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from art_patch.store.backends.database import Part
from art_patch.store.schema import tables
from art_patch.types import JSON

_RECENT = 100  # runs whose scores are looked at: scores have no index by time, and most are given soon


class Changes(Part):
    """Marks of the newest rows, read from the ends of indexes."""

    def marks(self) -> dict[str, Any]:
        """Return for each kind of row a mark that is another one after each change of such a row.

        Of scores, those of the newest runs are looked at, and those of the judge wherever they are (`groups`).
        """
        trajectories, scores = tables.trajectories.c, tables.scores.c
        newest = select(trajectories.id).order_by(trajectories.last_call_at.desc()).limit(_RECENT)
        queries = {
            "calls": select(func.max(tables.calls.c.started_at)),
            "scores": select(func.max(scores.at)).where(scores.trajectory_id.in_(newest)),
            "groups": select(func.max(tables.judgements.c.at)),
            "moves": select(func.max(tables.promotions.c.id)),
            "apps": select(func.max(tables.apps.c.at)),
            "control": select(func.max(tables.control.c.updated_at)),
        }
        with self._database.read() as connection:
            found = {kind: connection.execute(query).scalar() for kind, query in queries.items()}
        return found | {"moves": (found["moves"], found.pop("control"))}

    def first_call_at(self) -> float | None:
        """Return when the oldest call of the store began; `None` without calls."""
        return self._scalar(select(func.min(tables.calls.c.started_at)))


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
        log = tables.audit.c
        query = select(*tables.columns_of(tables.audit, Entry)).order_by(log.id.desc()).limit(limit)
        query = query if actions is None else query.where(log.action.in_(sorted(actions)))
        query = query if before is None else query.where(log.id < before)
        return tuple(Entry(*row) for row in self._rows(query))
