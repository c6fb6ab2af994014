"""Reads the calls and scores of a challenger and its champion since the challenger's test began. One short read.

Calls come without texts. A call that upstream answered because a policy failed counts for the policy that was asked:
the patch writes the challenger's name in front of the reason of the fallback, and no name for the champion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, exists, func, or_, select

from art_patch.store.backends.database import Database
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables
from art_patch.types import ArmCall, ArmTraffic, Score

LIMIT = 20_000  # newest calls of a test: reading them takes about a second

# Scores in groups of these states are no evidence. While a judge works on a group, its scores are stored before the
# defences have checked them (`formed`); scores of a quarantined group are not trusted.
_UNDEFENDED = ("formed", "quarantined")

_C, _H, _T = tables.calls, tables.choices, tables.trajectories


def arm_traffic(
    database: Database,
    *,
    challenger: str,
    champion: str,
    state: Literal["shadow", "canary"],
    since: float,
    limit: int = LIMIT,
) -> ArmTraffic:
    """Return the calls of both policies, and the scores of their runs.

    Args:
        challenger: name of the policy that is tested.
        champion: name of the policy that serves.
        state: `shadow` reads the challenger's copies and the calls that they copy; `canary` reads the app's own calls.
        since: when the challenger came into this state, seconds since the epoch.
        limit: read at most this many of the newest calls of both together; in `shadow`, of the copies.
    """
    with database.read() as connection:
        if state == "canary":
            mine = or_(_C.c.policy.in_((challenger, champion)), _C.c.fallback.is_not(None))
            query = _calls().where(_C.c.started_at >= since, _C.c.shadow_of.is_(None), mine)
            rows = connection.execute(query.order_by(_C.c.started_at.desc()).limit(limit)).all()
        else:
            rows = _copies_and_copied(connection, challenger, since, limit)
        # By their end: a call counts when its outcome is known.
        calls = sorted((_call(row, challenger, champion) for row in rows), key=lambda call: (call.at, call.id))
        scores = _scores(connection, sorted({call.trajectory_id for call in calls}))
        changes = _share_changes(connection, challenger, since) if state == "canary" else ()
    return ArmTraffic(tuple(calls), scores, changes)


def _calls() -> Select[*tuple[Any, ...]]:
    its = _H.c.call_id == _C.c.id
    choices = select(func.count()).select_from(_H).where(its).correlate(_C).scalar_subquery()
    return select(
        _C.c.id, _C.c.trajectory_id, _C.c.session_id, _T.c.group_id, _C.c.started_at, _C.c.duration_ms, _C.c.ttft_ms,
        _C.c.policy, _C.c.status, _C.c.fallback, _C.c.completion_tokens, _C.c.shadow_of,
        choices.label("choices"), exists().where(its, _H.c.finish_reason == "length").correlate(_C).label("cut"),
    ).join(_T, _T.c.id == _C.c.trajectory_id)  # fmt: skip


def _copies_and_copied(connection: Connection, challenger: str, since: float, limit: int) -> list[Row[Any]]:
    copies = _calls().where(_C.c.started_at >= since, _C.c.policy == challenger, _T.c.origin == "shadow")
    rows = list(connection.execute(copies.order_by(_C.c.started_at.desc()).limit(limit)))
    copied = sorted({row.shadow_of for row in rows if row.shadow_of is not None})
    # The original may have started before the test did, so it is looked up by id and not by time.
    for some in some_of(copied):
        rows += connection.execute(_calls().where(_C.c.id.in_(some)))
    return rows


def _call(row: Row[Any], challenger: str, champion: str) -> ArmCall:
    reason: str | None = row.fallback if row.policy is None else None
    fell_back = reason is not None
    asked = challenger if reason is not None and reason.startswith(f"{challenger}: ") else champion
    return ArmCall(
        id=row.id,
        trajectory_id=row.trajectory_id,
        session=row.session_id or row.trajectory_id,
        group_id=row.group_id,
        at=row.started_at + row.duration_ms / 1000,
        policy=asked if fell_back else row.policy or "",
        status=row.status,
        fell_back=fell_back,
        duration_ms=row.duration_ms,
        ttft_ms=row.ttft_ms,
        empty=bool(row.cut) or 0 < row.completion_tokens <= row.choices,
        shadow_of=row.shadow_of,
    )


def _scores(connection: Connection, trajectory_ids: Sequence[str]) -> tuple[Score, ...]:
    table = tables.scores
    its = tables.groups.c.id == table.c.group_id
    undefended = exists().where(its, tables.groups.c.state.in_(_UNDEFENDED)).correlate(table)
    found: list[Score] = []
    for some in some_of(trajectory_ids):
        query = select(*tables.columns_of(table, Score)).where(table.c.trajectory_id.in_(some), ~undefended)
        query = query.order_by(table.c.at, table.c.id)
        found += [Score(**dict(row)) for row in connection.execute(query).mappings()]
    return tuple(found)


def _share_changes(connection: Connection, challenger: str, since: float) -> tuple[float, ...]:
    table = tables.promotions
    # A move from canary to canary changes the share.
    changes = select(table.c.at).where(
        table.c.policy == challenger, table.c.from_state == "canary", table.c.to_state == "canary", table.c.at > since
    )
    return tuple(connection.scalars(changes.order_by(table.c.at)))
