"""Reads feedback: corrected answers, rewards outside of groups, and groups that both a user and the judge scored."""

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
    """Return the corrections by trajectory, oldest first; trajectories without corrections are left out."""
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
    """Return the ids of trajectories that were corrected after `since`, newest first, without held-out ones."""
    c, t, g = tables.corrections.c, tables.trajectories.c, tables.groups.c
    newest = func.max(c.at)  # a run may be corrected more than once
    query = (
        select(c.trajectory_id)
        .join(tables.trajectories, t.id == c.trajectory_id)
        .outerjoin(tables.groups, g.id == t.group_id)  # a corrected run may be in no group
        .where(c.at > since, or_(g.held_out.is_(None), g.held_out.is_(False)))
        .group_by(c.trajectory_id)
        .order_by(newest.desc(), c.trajectory_id)
        .limit(limit)
    )
    with database.read() as connection:
        return tuple(connection.scalars(query))


def rewarded_alone(database: Database, *, since: float, limit: int) -> tuple[str, ...]:
    """Return the ids of ungrouped trajectories that a user or the app scored after `since`, newest scores first."""
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

    The siblings have these scores and the judge's, but no calls, because a comparison needs none.
    """
    t, s, g = tables.trajectories.c, tables.scores.c, tables.groups.c
    # The judge's score counts only in the group that the run is in now.
    theirs = and_(s.source == "user", s.name.in_(names))
    of_judge = and_(s.name == "ruler", s.group_id == t.group_id)
    spoken_of = select(t.group_id).join(tables.scores, s.trajectory_id == t.id).where(theirs, t.group_id.is_not(None))
    # Ids are uuid7, so the largest are the newest.
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
