"""What tells that something in the store has changed, read from the ends of indexes: cheap enough for each second."""

from typing import Any

from sqlalchemy import func, select, text

from art_patch.store.backends.database import Part
from art_patch.store.schema import tables

# Scores have no index by time. SQLite numbers its rows, and PostgreSQL counts what was written, within a second.
_SCORES = {
    "sqlite": "select max(rowid) from scores",
    "postgresql": "select n_tup_ins + n_tup_upd + n_tup_del from pg_stat_user_tables where relid = 'scores'::regclass",
}


class Changes(Part):
    """Marks of the newest rows."""

    def marks(self) -> dict[str, Any]:
        """Return for each kind of row a mark that is another one after each change of such a row."""
        newest = {
            "calls": select(func.max(tables.calls.c.started_at)),
            "groups": select(func.max(tables.judgements.c.at)),
            "moves": select(func.max(tables.promotions.c.id)),
            "apps": select(func.max(tables.apps.c.at)),
        }
        with self._database.read() as connection:
            found = {kind: connection.execute(query).scalar() for kind, query in newest.items()}
            # Of all projects of the store: a page that looks in vain sees what it saw before.
            scores = connection.execute(text(_SCORES[connection.dialect.name])).scalar()
            control = connection.execute(select(func.max(tables.control.c.updated_at))).scalar()
        return found | {"scores": scores, "moves": (found["moves"], control)}
