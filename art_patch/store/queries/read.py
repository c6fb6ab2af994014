"""Reads trajectories and groups from the store, for the job and the command line, in short read transactions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Select, Table, func, select

from art_patch.store.backends.database import Database
from art_patch.store.queries.loading import load_calls, some_of
from art_patch.store.schema import tables
from art_patch.store.schema.tables import columns_of
from art_patch.trajectories import followed
from art_patch.types import COPIES, JSON, AppReport, Group, Score, SpanInfo, Trajectory, TrajectoryInfo

_Record = TypeVar("_Record", Score, SpanInfo)


class Reader:
    """Reads trajectories, groups, reports of app processes and counts, for the job and the command line."""

    def __init__(self, database: Database) -> None:
        """Read through `database`."""
        self._database = database

    def trajectories(self, ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """Return the trajectories `ids` with calls, messages, scores and spans, in this order; skip unknown ids."""
        with self._database.read() as connection:  # one snapshot: no call is seen without its trajectory
            infos = {
                row["id"]: _info(row)
                for some in some_of(ids)
                for row in _rows(connection, select(tables.trajectories).where(tables.trajectories.c.id.in_(some)))
            }
            calls = load_calls(connection, ids)
            scores = _hanging_on(connection, tables.scores, Score, "at", ids)
            spans = _hanging_on(connection, tables.spans, SpanInfo, "started_at", ids)
        return tuple(
            Trajectory(infos[key], tuple(calls.get(key, ())), tuple(scores[key]), tuple(spans[key]))
            for key in ids
            if key in infos
        )

    def recent(self, *, limit: int = 20) -> tuple[Trajectory, ...]:
        """Return the newest `limit` trajectories with their calls, newest first."""
        with self._database.read() as connection:
            table = tables.trajectories
            ids = list(connection.scalars(select(table.c.id).order_by(table.c.last_call_at.desc()).limit(limit)))
        return self.trajectories(ids)

    def known(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of the `ids` that belong to trajectories in this store."""
        table = tables.trajectories.c.id
        with self._database.read() as connection:
            return frozenset(
                key for some in some_of(ids) for key in connection.scalars(select(table).where(table.in_(some)))
            )

    def ungrouped(
        self, *, settled_before: float, ended: Sequence[str] = (), limit: int = 10_000
    ) -> tuple[Trajectory, ...]:
        """Return complete trajectories that are in no group yet, oldest first.

        Args:
            settled_before: a trajectory is complete if its last call ended by this time, seconds since the epoch.
            ended: ids of trajectories that are complete too, because the caller knows that no call will follow. The
                end of a `trajectory()` block does not prove that: another block with the same id may continue it.
            limit: maximum number of trajectories that are found by `settled_before`; `ended` has no limit.
        """
        table = tables.trajectories
        # Copies are put into groups by the step that makes them.
        theirs = (table.c.group_id.is_(None), table.c.origin.not_in(COPIES))
        query = (
            select(table.c.id)
            .where(*theirs, table.c.last_call_at <= settled_before)
            .order_by(table.c.last_call_at)
            .limit(limit)
        )
        with self._database.read() as connection:
            ids = list(connection.scalars(query))
            for some in some_of(ended):
                query = select(table.c.id).where(*theirs, table.c.id.in_(some), table.c.last_call_at.is_not(None))
                ids += connection.scalars(query.order_by(table.c.last_call_at))
        return self.trajectories(list(dict.fromkeys(ids)))  # an id may be in both parts

    def group_ids(self, *, state: str, held_out: bool | None = None, limit: int = 1_000) -> tuple[str, ...]:
        """Return the ids of the newest `limit` groups in this state, sorted from old to new.

        Args:
            held_out: `True` returns only groups that are held out for the gate, `False` only the others; `None` both.
        """
        table = tables.groups
        # Ids are uuid7, so their order is the order of time.
        query = select(table.c.id).where(table.c.state == state).order_by(table.c.id.desc()).limit(limit)
        if held_out is not None:
            query = query.where(table.c.held_out == held_out)
        with self._database.read() as connection:
            return tuple(connection.scalars(query))[::-1]

    def groups(self, *, state: str, held_out: bool | None = None, limit: int = 1_000) -> tuple[Group, ...]:
        """Return the groups that `group_ids` finds, with their trajectories, sorted from old to new."""
        return self.groups_of(self.group_ids(state=state, held_out=held_out, limit=limit))

    def groups_of(self, ids: Sequence[str]) -> tuple[Group, ...]:
        """Return the groups `ids` with their trajectories, in this order; skip unknown ids."""
        table = tables.groups
        found: dict[str, Mapping[str, Any]] = {}
        members: dict[str, list[str]] = defaultdict(list)
        with self._database.read() as connection:
            for some in some_of(ids):
                found |= {row["id"]: row for row in _rows(connection, select(table).where(table.c.id.in_(some)))}
                query = select(tables.trajectories.c.group_id, tables.trajectories.c.id).where(
                    tables.trajectories.c.group_id.in_(some)
                )
                for group_id, trajectory_id in connection.execute(query.order_by(tables.trajectories.c.id)):
                    members[group_id].append(trajectory_id)
        # A second snapshot: a member that was erased in between is left out of its group below.
        whole = {t.id: t for t in self.trajectories([key for keys in members.values() for key in keys])}
        # All siblings of a resampled group answer the same turn, so the first call of the first one names it.
        turns = {
            key: call.shadow_of
            for key, row in found.items()
            if row["how"] == "resampled"
            for member in members[key][:1]
            for call in whole[member].calls[:1]
            if call.shadow_of is not None
        }
        after = self._followed(turns) if turns else {}
        return tuple(
            Group(
                id=row["id"],
                scenario_key=row["scenario_key"],
                how=row["how"],
                held_out=bool(row["held_out"]),  # SQLite gives 0 or 1
                trajectories=tuple(whole[key] for key in members[row["id"]] if key in whole),
                followed=after.get(row["id"], ()),
            )
            for row in (found[key] for key in ids if key in found)
        )

    def _followed(self, turns: Mapping[str, str]) -> dict[str, tuple[JSON, ...]]:
        """Return the messages that followed each of these calls in its own run.

        Args:
            turns: call ids by any key; the result has the same keys.
        """
        table = tables.calls
        with self._database.read() as connection:
            # The whole run is read, because what followed is in the prompts of its later calls.
            runs = {
                call_id: trajectory_id
                for some in some_of(sorted(set(turns.values())))
                for call_id, trajectory_id in connection.execute(
                    select(table.c.id, table.c.trajectory_id).where(table.c.id.in_(some))
                )
            }
        calls = {call.id: (run, call) for run in self.trajectories(sorted(set(runs.values()))) for call in run.calls}
        return {key: followed(*calls[call_id]) for key, call_id in turns.items() if call_id in calls}

    def arrivals(self, users: Sequence[str]) -> tuple[float | None, dict[str, float]]:
        """Return when the store's first trajectory started (`None` if it is empty), and when each user's first did."""
        table = tables.trajectories.c
        own = table.origin.not_in(COPIES)  # a copy has its original's user, and is made later
        with self._database.read() as connection:
            first = connection.scalar(select(func.min(table.started_at)).where(own))
            query = select(table.user_id, func.min(table.started_at)).where(own).group_by(table.user_id)
            came = {
                user: at
                for some in some_of(sorted(set(users)))
                for user, at in connection.execute(query.where(table.user_id.in_(some)))
            }
        return first, came

    def calls_of_apps(self, *, since: float, until: float) -> int:
        """Return how many calls apps started from `since` until `until`, without copies and imported calls."""
        calls, runs = tables.calls.c, tables.trajectories.c
        query = (
            select(func.count())
            .select_from(tables.calls.join(tables.trajectories, runs.id == calls.trajectory_id))
            .where(calls.started_at >= since, calls.started_at <= until, runs.origin.not_in((*COPIES, "imported")))
        )
        with self._database.read() as connection:
            return connection.scalar(query) or 0

    def apps(self, *, since: float) -> tuple[AppReport, ...]:
        """Return the newest report of each app process that has reported since `since`, newest first."""
        table = tables.apps
        with self._database.read() as connection:
            rows = _rows(
                connection, select(*columns_of(table, AppReport)).where(table.c.at >= since).order_by(table.c.at.desc())
            )
            return tuple(AppReport(**row) for row in rows)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of calls, copies, groups and other rows that `art-patch status` shows, by name."""
        calls, groups = tables.calls, tables.groups
        with self._database.read() as connection:
            one = connection.execute(
                select(
                    func.count(),
                    func.count(calls.c.policy),  # skips NULL, which is upstream
                    func.count(calls.c.fallback),
                    func.count().filter(calls.c.status != "ok"),
                    func.count().filter(calls.c.untrainable.is_(None)),
                    func.max(calls.c.started_at),
                )
                .select_from(calls)
                .where(calls.c.shadow_of.is_(None))
            ).one()
            copies = {
                origin: count
                for origin, count in connection.execute(
                    select(tables.trajectories.c.origin, func.count())
                    .where(tables.trajectories.c.origin.in_(COPIES))
                    .group_by(tables.trajectories.c.origin)
                )
            }
            reasons = connection.execute(
                select(calls.c.untrainable, func.count())
                .where(calls.c.untrainable.is_not(None), calls.c.shadow_of.is_(None))
                .group_by(calls.c.untrainable)
                .order_by(func.count().desc())
            ).all()
            states = connection.execute(select(groups.c.state, func.count()).group_by(groups.c.state)).all()
            seen = tables.trajectories.c.origin.not_in(COPIES)
            trajectories = connection.scalar(select(func.count()).select_from(tables.trajectories).where(seen))
            scenarios = connection.scalar(select(func.count()).select_from(tables.scenarios))
            scored = connection.scalar(select(func.count()).select_from(tables.scores))
            spent = _spent(connection)
        names = ("calls", "calls_by_policy", "calls_fell_back", "calls_not_ok", "calls_trainable", "last_call_at")
        return dict(zip(names, one, strict=True)) | {
            "calls_shadow": copies.get("shadow", 0),
            "calls_resampled": copies.get("resampled", 0),
            "trajectories": trajectories,
            "scenarios": scenarios,
            "scores": scored,
            "groups": {state: count for state, count in states},
            "untrainable": {reason: count for reason, count in reasons},
            "judge": spent,
        }


def _spent(connection: Connection) -> dict[str, Any]:
    """Return what judging cost so far. `cost_usd` covers calls of known price; `unpriced` counts the others."""
    table = tables.judgements.c
    sums = [
        func.coalesce(func.sum(column), 0) for column in (table.calls, table.prompt_tokens, table.completion_tokens)
    ]
    unpriced = func.coalesce(func.sum(table.calls).filter(table.cost_usd.is_(None)), 0)
    row = connection.execute(select(*sums, func.coalesce(func.sum(table.cost_usd), 0.0), unpriced)).one()
    names = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "unpriced")
    kinds = (int, int, int, float, int)  # PostgreSQL sums whole numbers to decimals
    return {name: kind(value) for name, kind, value in zip(names, kinds, row, strict=True)}


def _rows(connection: Connection, query: Select[Any]) -> Iterable[Mapping[str, Any]]:
    # A `RowMapping` accepts columns as keys too, so the type checker does not take it for a `Mapping[str, Any]`.
    return cast("Iterable[Mapping[str, Any]]", connection.execute(query).mappings())


def _info(row: Mapping[str, Any]) -> TrajectoryInfo:
    values: dict[str, Any] = {name: row[name] for name in TrajectoryInfo.__slots__}
    values["tags"] = tuple(row["tags"])
    return TrajectoryInfo(**values)


def _hanging_on(
    connection: Connection, table: Table, record: type[_Record], order: str, trajectory_ids: Sequence[str]
) -> Mapping[str, list[_Record]]:
    found: dict[str, list[_Record]] = defaultdict(list)
    for some in some_of(trajectory_ids):
        query = select(*columns_of(table, record)).where(table.c.trajectory_id.in_(some))
        query = query.order_by(table.c[order], table.c.id)
        for row in _rows(connection, query):
            found[row["trajectory_id"]].append(record(**row))
    return found
