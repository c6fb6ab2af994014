"""What tells that something in the store has changed, read from the ends of indexes: cheap enough for each second."""

from typing import Any

from sqlalchemy import func, select

from art_patch.store.backends.database import Part
from art_patch.store.schema import tables

_RECENT = 100  # runs whose scores are looked at: scores have no index by time, and most are given soon


class Changes(Part):
    """Marks of the newest rows."""

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
        with self._database.read() as connection:
            return connection.scalar(select(func.min(tables.calls.c.started_at)))
