"""Which decisions were made known to people outside, so that each is told once, however many processes look.

Two rows of `control` per project: the id of the newest change of a policy's state that was made known, and words that
were said last about something that lasts, such as the advice of `art-patch report`. A process claims what it will say
in the transaction that reads it. So one that is killed between the two says nothing, and no other says it twice.
"""

import json

from sqlalchemy import func, select

from art_patch.store.backends.database import Part, decide_alone
from art_patch.store.ledger.decisions import control_of, set_control
from art_patch.store.schema import tables
from art_patch.types import JSON

_KEY = "made known"
_MOST = 100  # moves that are handed out at once: what a process that is killed at this moment leaves unsaid


class Notices(Part):
    """Hands out what is to be made known, once."""

    def claim_moves(self, *, since: float) -> list[JSON] | None:
        """Return changes of policies' states that were not made known yet, oldest first, and note that they are.

        `None` if there is no other one; else there may be more. The first call of a project returns none, so that no
        old history is told. Changes before `since` are skipped. `again` tells that the policy was champion before.
        """
        table = tables.promotions
        with self._database.read() as connection:
            newest = connection.scalar(select(func.max(table.c.id))) or 0
            known = json.loads(control_of(connection, _KEY) or "{}").get("move")
        if known == newest:
            return None
        with self._database.write(durable=True) as connection:
            decide_alone(connection)
            kept = json.loads(control_of(connection, _KEY) or "{}")
            newest = connection.scalar(select(func.max(table.c.id))) or 0  # another process may have added some
            # A table that was put back from a backup alone has fewer moves.
            known = min(kept.get("move", newest), newest)
            columns = [column for column in table.c if column.name not in tables.SCOPE]
            query = select(*columns).where(table.c.id > known).order_by(table.c.id).limit(_MOST)
            rows = [dict(row) for row in connection.execute(query).mappings()]
            set_control(connection, _KEY, json.dumps(kept | {"move": rows[-1]["id"] if rows else known}))
            names = {row["policy"] for row in rows}
            served = select(table.c.policy, func.min(table.c.id)).where(table.c.to_state == "champion")
            served = served.where(table.c.policy.in_(names)).group_by(table.c.policy)
            first = {policy: id for policy, id in connection.execute(served)}
        return [row | {"again": row["id"] > first.get(row["policy"], row["id"])} for row in rows if row["at"] >= since]

    def claim_words(self, about: str, words: str) -> bool:
        """Note what is said about something, and return whether something else was said last, or nothing."""
        with self._database.write(durable=True) as connection:
            decide_alone(connection)
            kept = json.loads(control_of(connection, _KEY) or "{}")
            if kept.get(about) == words:
                return False
            set_control(connection, _KEY, json.dumps(kept | {about: words}))
            return True
