"""What two policies answered to the same prompt, for a person to read side by side.

Prompts are chains of messages under one hash, so equal prompts are found by their ids alone: a shadow's copies of what
the champion answered, siblings that were re-sampled, and whatever the app asked twice while a canary had its share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Subquery, and_, func, select

from art_patch.store.backends.database import Database
from art_patch.store.queries.loading import load_calls
from art_patch.store.schema import tables
from art_patch.types import Call

_C = tables.calls


class Pair(NamedTuple):
    """Two answered calls with the same messages and tools.

    Attributes:
        a: of the one policy.
        b: of the other.
    """

    a: Call
    b: Call


def answered_by_both(database: Database, a: str | None, b: str | None, *, limit: int) -> tuple[int, tuple[Pair, ...]]:
    """Return how many prompts both answered, and the newest of them, each with the newest answer of both.

    Args:
        database: where traffic was recorded.
        a: a policy; `None` is upstream.
        b: another one.
        limit: how many pairs.
    """
    one, other = _newest(a), _newest(b)
    both = and_(one.c.prompt == other.c.prompt, one.c.tools.is_not_distinct_from(other.c.tools))
    with database.read() as connection:
        count = connection.scalar(select(func.count()).select_from(one.join(other, both))) or 0
        query = select(one.c.id, other.c.id).select_from(one.join(other, both))
        keys = [tuple(row) for row in connection.execute(query.order_by(one.c.id.desc()).limit(limit))]
        wanted = [key for pair in keys for key in pair]
        homes = connection.scalars(select(_C.c.trajectory_id).where(_C.c.id.in_(wanted)).distinct()).all()
        calls = {call.id: call for its in load_calls(connection, sorted(homes)).values() for call in its}
    return count, tuple(Pair(calls[mine], calls[theirs]) for mine, theirs in keys)


def _newest(policy: str | None) -> Subquery:
    """The newest answered call of a policy for each prompt; ids grow with time."""
    by: ColumnElement[Any] = _C.c.policy.is_(None) if policy is None else _C.c.policy == policy
    answered = select(_C.c.prompt, _C.c.tools, func.max(_C.c.id).label("id")).where(by, _C.c.status == "ok")
    return answered.group_by(_C.c.prompt, _C.c.tools).subquery()
