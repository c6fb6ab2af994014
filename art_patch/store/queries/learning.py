"""Says which runs may be learned from. Every query by which the job learns asks `may_learn`, so that none forgets it.

A run is left out if the app said so (`trajectory(learn=False)` and the like), or if its user withdrew. Learning is all
that a judge, an embedding model, the gate, an update, a repetition or a file for training gets.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, exists, func, not_, select

from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import tables
from art_patch.types import COPIES

_T, _W = tables.trajectories.c, tables.withdrawals.c

NOT_LEARNED = "the app said that nothing may be learned from it"
WITHDRAWN = "its user withdrew"


def _withdrew() -> ColumnElement[bool]:
    return exists().where(_W.user_id == _T.user_id).correlate(tables.trajectories)


def may_learn() -> ColumnElement[bool]:
    """Return the condition on a row of `trajectories` that its run may be learned from."""
    return and_(_T.learn, not_(_withdrew()))


def learned_from(connection: Connection, ids: Sequence[str]) -> frozenset[str]:
    """Return those of these trajectories that may be learned from."""
    return frozenset(key for (key,) in rows_in(connection, select(_T.id).where(may_learn()), _T.id, ids))


def left_out(connection: Connection) -> dict[str, int]:
    """Return reason -> number of runs that are not learned from, copies excluded."""
    its, own = func.count(), _T.origin.not_in(COPIES)
    queries: dict[str, Any] = {
        NOT_LEARNED: select(its).select_from(tables.trajectories).where(own, not_(_T.learn)),
        WITHDRAWN: select(its).select_from(tables.trajectories).where(own, _T.learn, _withdrew()),
    }
    counts = {reason: connection.scalar(query) or 0 for reason, query in queries.items()}
    return {reason: count for reason, count in counts.items() if count}
