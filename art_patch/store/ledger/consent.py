"""Keeps who may not be learned from, and what the project's operator was told.

`queries/learning.py` has the condition that follows from it, which all queries of the job use.
"""

import json
import time
from collections.abc import Sequence

from sqlalchemy import delete, not_, select, update

from art_patch.store.backends.database import Part, decide_alone
from art_patch.store.erasure.rights import with_shadows
from art_patch.store.ledger import decisions
from art_patch.store.ledger.decisions import note
from art_patch.store.queries.learning import learned_from, left_out
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables
from art_patch.store.write import subject_of

_T, _W = tables.trajectories, tables.withdrawals
_STARTS = "first_starts"


class Consent(Part):
    """Whose runs may be learned from."""

    def withdraw(self, user: str, *, who: str, now: float | None = None) -> bool:
        """Learn from no run of this user any more, past ones included; return whether that is new."""
        at = time.time() if now is None else now
        row = {"user_id": user, "at": at, "who": who}
        with self._database.write(durable=True) as connection:
            if connection.scalar(select(_W.c.at).where(_W.c.user_id == user)) is not None:
                return False
            connection.execute(self._database.insert(_W).on_conflict_do_nothing(), [row])
            note(connection, who, "consent", subject_of("user", user) | {"withdrawn": True}, at)
            return True

    def give(self, user: str, *, who: str, now: float | None = None) -> bool:
        """Let the user's runs be learned from again, but those that the app marked; return whether that is new."""
        with self._database.write(durable=True) as connection:
            if not connection.execute(delete(_W).where(_W.c.user_id == user)).rowcount:
                return False
            at = time.time() if now is None else now
            note(connection, who, "consent", subject_of("user", user) | {"withdrawn": False}, at)
            return True

    def withdrawn(self) -> dict[str, float]:
        """Return the users who withdrew, each with the time of it, oldest first."""
        return {user: at for user, at in self._rows(select(_W.c.user_id, _W.c.at).order_by(_W.c.at, _W.c.user_id))}

    def learned_from(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of these trajectories that may be learned from; unknown ids are left out."""
        return self._read(learned_from, ids)

    def left_out(self) -> dict[str, int]:
        """Return reason -> number of runs that are not learned from."""
        return self._read(left_out)

    def spread(self) -> int:
        """Mark the copies and repetitions of runs that were marked after these were made; return how many there are."""
        late = select(_T.c.id).where(not_(_T.c.learn), _T.c.group_id.is_not(None))
        with self._database.read() as connection:
            marked = list(connection.scalars(late))  # those that were marked in time are in no group, and have none
            copies = sorted(learned_from(connection, with_shadows(connection, marked)) if marked else ())
        for some in some_of(copies):
            with self._database.write(durable=True) as connection:
                connection.execute(update(_T).where(_T.c.id.in_(some)).values(learn=False))
        return len(copies)

    def note_start(self, command: str) -> bool:
        """Note that the project's operator ran this command; return whether it was the first time."""
        with self._database.write(durable=True) as connection:
            decide_alone(connection)
            noted: list[str] = json.loads(decisions.control_of(connection, _STARTS) or "[]")
            if command in noted:
                return False
            decisions.set_control(connection, _STARTS, json.dumps([*noted, command]))
            return True
