"""What people said of runs: what an answer should have been, and how they judged what the judge judged too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import and_, func, or_, select

from art_patch.store.backends.database import Database
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables
from art_patch.types import Correction, Group, Score, Trajectory, TrajectoryInfo

_GROUPS = 1_000


def corrections_of(database: Database, trajectory_ids: Sequence[str]) -> dict[str, list[Correction]]:
    """Return the corrections of these trajectories, oldest first; those without any are left out."""
    table = tables.corrections
    found: dict[str, list[Correction]] = defaultdict(list)
    with database.read() as connection:
        for some in some_of(trajectory_ids):
            query = select(*tables.columns_of(table, Correction)).where(table.c.trajectory_id.in_(some))
            query = query.order_by(table.c.at, table.c.id)
            for row in connection.execute(query).mappings():
                values = cast("Mapping[str, Any]", row)
                found[values["trajectory_id"]].append(Correction(**values))
    return dict(found)


def corrected(database: Database, *, since: float, limit: int) -> tuple[str, ...]:
    """Return the trajectories that were corrected after `since`, the newest corrections first; none that is held out.

    Args:
        database: the store's.
        since: seconds since the epoch.
        limit: how many at most.
    """
    c, t, g = tables.corrections.c, tables.trajectories.c, tables.groups.c
    newest = func.max(c.at)
    query = (
        select(c.trajectory_id)
        .join(tables.trajectories, t.id == c.trajectory_id)
        .outerjoin(tables.groups, g.id == t.group_id)
        .where(c.at > since, or_(g.held_out.is_(None), g.held_out.is_(False)))
        .group_by(c.trajectory_id)
        .order_by(newest.desc(), c.trajectory_id)
        .limit(limit)
    )
    with database.read() as connection:
        return tuple(connection.scalars(query))


def rewarded_alone(database: Database, *, since: float, limit: int) -> tuple[str, ...]:
    """Return the trajectories in no group that a user or their code scored after `since`, the newest scores first.

    Args:
        database: the store's.
        since: seconds since the epoch.
        limit: how many at most.
    """
    s, t = tables.scores.c, tables.trajectories.c
    query = (
        select(s.trajectory_id)
        .join(tables.trajectories, t.id == s.trajectory_id)
        .where(s.source.in_(("user", "code")), s.at > since, t.group_id.is_(None))
        .group_by(s.trajectory_id)
        .order_by(func.max(s.at).desc(), s.trajectory_id)
        .limit(limit)
    )
    with database.read() as connection:
        return tuple(connection.scalars(query))


def opinions(database: Database, names: Sequence[str], *, limit: int = _GROUPS) -> tuple[Group, ...]:
    """Return the newest groups in which users gave scores of these names, for a comparison with the judge.

    Their siblings hold those scores and the judge's, and no calls: that is all a comparison needs.
    """
    t, s, g = tables.trajectories.c, tables.scores.c, tables.groups.c
    theirs = and_(s.source == "user", s.name.in_(names))
    of_judge = and_(s.name == "ruler", s.group_id == t.group_id)
    spoken_of = select(t.group_id).join(tables.scores, s.trajectory_id == t.id).where(theirs, t.group_id.is_not(None))
    newest = select(g.id, g.scenario_key, g.how, g.held_out).where(g.id.in_(spoken_of)).order_by(g.id.desc())
    with database.read() as connection:
        groups = connection.execute(newest.limit(limit)).all()
        given: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
        for some in some_of([group.id for group in groups]):
            query = (
                select(t.group_id.label("their_group"), *tables.columns_of(tables.scores, Score))
                .join(tables.scores, s.trajectory_id == t.id)
                .where(t.group_id.in_(some), or_(theirs, of_judge))
                .order_by(t.id, s.at, s.id)
            )
            for row in connection.execute(query).mappings():
                values = {str(name): value for name, value in row.items()}
                group_id = values.pop("their_group")
                given[group_id][values["trajectory_id"]].append(Score(**values))
    return tuple(
        Group(
            id=group.id,
            scenario_key=group.scenario_key,
            how=group.how,
            held_out=bool(group.held_out),
            trajectories=tuple(
                Trajectory(TrajectoryInfo(key, 0.0), (), tuple(scores)) for key, scores in given[group.id].items()
            ),
        )
        for group in groups
    )
