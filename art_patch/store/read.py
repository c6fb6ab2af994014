"""Reading records back. Every method is one short read transaction."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Select, func, select

from art_patch.chain import ROOT
from art_patch.records import JSON, AppReport, Call, Choice, Group, Score, Trajectory, TrajectoryInfo
from art_patch.store import tables
from art_patch.store.codec import expand, unpack_ids, unpack_logprobs
from art_patch.store.connect import Database

_T = TypeVar("_T")
_IN = 500  # SQLite allows 32,766 bound values; short statements keep readers short


class Reader:
    """Queries of the job and the command line."""

    def __init__(self, database: Database) -> None:
        """Read through `database`."""
        self._database = database

    def trajectories(self, ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """Return these trajectories whole (calls, messages, scores), in the order asked; unknown ids are left out."""
        with self._database.read() as connection:
            infos = {
                row["id"]: _info(row)
                for some in _some(ids)
                for row in _rows(connection, select(tables.trajectories).where(tables.trajectories.c.id.in_(some)))
            }
            calls = _calls(connection, ids)
            scores = _scores(connection, ids)
        return tuple(
            Trajectory(infos[key], tuple(calls.get(key, ())), tuple(scores.get(key, ()))) for key in ids if key in infos
        )

    def recent(self, *, limit: int = 20) -> tuple[Trajectory, ...]:
        """Return the newest trajectories, newest first."""
        with self._database.read() as connection:
            table = tables.trajectories
            ids = list(connection.scalars(select(table.c.id).order_by(table.c.last_call_at.desc()).limit(limit)))
        return self.trajectories(ids)

    def ungrouped(self, *, settled_before: float, limit: int = 10_000) -> tuple[Trajectory, ...]:
        """Return trajectories that no group holds yet and whose last call ended by `settled_before`, oldest first."""
        table = tables.trajectories
        query = (
            select(table.c.id)
            .where(table.c.group_id.is_(None), table.c.last_call_at <= settled_before, table.c.origin != "shadow")
            .order_by(table.c.last_call_at)
            .limit(limit)
        )
        with self._database.read() as connection:
            ids = list(connection.scalars(query))
        return self.trajectories(ids)

    def groups(self, *, state: str, held_out: bool | None = None, limit: int = 1_000) -> tuple[Group, ...]:
        """Return the newest groups in this state, oldest of them first, whole."""
        table = tables.groups
        query = select(table).where(table.c.state == state).order_by(table.c.created_at.desc(), table.c.id).limit(limit)
        if held_out is not None:
            query = query.where(table.c.held_out == held_out)
        with self._database.read() as connection:
            rows = list(_rows(connection, query))[::-1]
            members: dict[str, list[str]] = defaultdict(list)
            for some in _some([row["id"] for row in rows]):
                found = select(tables.trajectories.c.group_id, tables.trajectories.c.id).where(
                    tables.trajectories.c.group_id.in_(some)
                )
                for group_id, trajectory_id in connection.execute(found.order_by(tables.trajectories.c.id)):
                    members[group_id].append(trajectory_id)
        whole = {t.id: t for t in self.trajectories([key for ids in members.values() for key in ids])}
        return tuple(
            Group(
                id=row["id"],
                scenario_key=row["scenario_key"],
                how=row["how"],
                held_out=bool(row["held_out"]),
                trajectories=tuple(whole[key] for key in members[row["id"]]),
            )
            for row in rows
        )

    def apps(self, *, since: float) -> tuple[AppReport, ...]:
        """Return the last report of each app process that reported after `since`, newest first."""
        table = tables.apps
        with self._database.read() as connection:
            rows = _rows(connection, select(table).where(table.c.at >= since).order_by(table.c.at.desc()))
            return tuple(AppReport(**row) for row in rows)

    def counts(self) -> dict[str, Any]:
        """Return what the store holds, for `art-patch status`."""
        calls, groups = tables.calls, tables.groups
        with self._database.read() as connection:
            one = connection.execute(
                select(
                    func.count(),
                    func.count(calls.c.policy),
                    func.count(calls.c.fallback),
                    func.count().filter(calls.c.status != "ok"),
                    func.count().filter(calls.c.untrainable.is_(None)),
                    func.max(calls.c.started_at),
                )
                .select_from(calls)
                .where(calls.c.shadow_of.is_(None))
            ).one()
            shadows = connection.scalar(select(func.count(calls.c.shadow_of)))
            reasons = connection.execute(
                select(calls.c.untrainable, func.count())
                .where(calls.c.untrainable.is_not(None), calls.c.shadow_of.is_(None))
                .group_by(calls.c.untrainable)
                .order_by(func.count().desc())
            ).all()
            states = connection.execute(select(groups.c.state, func.count()).group_by(groups.c.state)).all()
            seen = tables.trajectories.c.origin != "shadow"
            trajectories = connection.scalar(select(func.count()).select_from(tables.trajectories).where(seen))
            scenarios = connection.scalar(select(func.count()).select_from(tables.scenarios))
            scored = connection.scalar(select(func.count()).select_from(tables.scores))
        names = ("calls", "calls_by_policy", "calls_fell_back", "calls_not_ok", "calls_trainable", "last_call_at")
        return dict(zip(names, one, strict=True)) | {
            "calls_shadow": shadows,
            "trajectories": trajectories,
            "scenarios": scenarios,
            "scores": scored,
            "groups": {state: count for state, count in states},
            "untrainable": {reason: count for reason, count in reasons},
        }


def _some(values: Sequence[_T]) -> Iterator[Sequence[_T]]:
    for start in range(0, len(values), _IN):
        yield values[start : start + _IN]


def _rows(connection: Connection, query: Select[Any]) -> Iterable[Mapping[str, Any]]:
    # A `RowMapping` takes columns as keys too, so for the type checker it is no `Mapping[str, Any]`.
    return cast("Iterable[Mapping[str, Any]]", connection.execute(query).mappings())


def _info(row: Mapping[str, Any]) -> TrajectoryInfo:
    values: dict[str, Any] = {name: row[name] for name in TrajectoryInfo.__slots__}
    values["tags"] = tuple(row["tags"])
    return TrajectoryInfo(**values)


def _scores(connection: Connection, trajectory_ids: Sequence[str]) -> dict[str, list[Score]]:
    found: dict[str, list[Score]] = defaultdict(list)
    table = tables.scores
    for some in _some(trajectory_ids):
        query = select(table).where(table.c.trajectory_id.in_(some)).order_by(table.c.at, table.c.id)
        for row in _rows(connection, query):
            found[row["trajectory_id"]].append(Score(**row))
    return found


def _calls(connection: Connection, trajectory_ids: Sequence[str]) -> dict[str, list[Call]]:
    rows: list[Mapping[str, Any]] = []
    for some in _some(trajectory_ids):
        query = select(tables.calls).where(tables.calls.c.trajectory_id.in_(some))
        rows += _rows(connection, query.order_by(tables.calls.c.started_at, tables.calls.c.id))
    choice_rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for some in _some([row["id"] for row in rows]):
        query = select(tables.choices).where(tables.choices.c.call_id.in_(some)).order_by(tables.choices.c.index)
        for choice in _rows(connection, query):
            choice_rows[choice["call_id"]].append(choice)
    messages = _Messages(
        connection,
        [row["prompt"] for row in rows] + [c["answer"] for choices in choice_rows.values() for c in choices],
    )
    tools = _blobs(connection, {row["tools"] for row in rows if row["tools"] is not None})
    found: dict[str, list[Call]] = defaultdict(list)
    for row in rows:
        values = {name: row[name] for name in Call.__slots__ if name in row}
        values |= {
            "messages": messages.chain(row["prompt"]),
            "tools": tools.get(row["tools"], ()),
            "prompt_token_ids": unpack_ids(row["prompt_token_ids"]),
            "choices": tuple(
                Choice(
                    index=choice["index"],
                    message=messages.one(choice["answer"]),
                    finish_reason=choice["finish_reason"],
                    token_ids=unpack_ids(choice["token_ids"]),
                    logprobs=unpack_logprobs(choice["logprobs"]),
                )
                for choice in choice_rows[row["id"]]
            ),
        }
        found[row["trajectory_id"]].append(Call(**values))
    return found


def _blobs(connection: Connection, keys: Iterable[bytes]) -> dict[bytes, tuple[JSON, ...]]:
    found: dict[bytes, tuple[JSON, ...]] = {}
    for some in _some(list(keys)):
        for key, body in connection.execute(
            select(tables.blobs.c.id, tables.blobs.c.body).where(tables.blobs.c.id.in_(some))
        ):
            found[key] = tuple(json.loads(expand(body)))
    return found


class _Messages:
    """The chains above some nodes, read level by level: as many queries as the longest conversation has turns."""

    def __init__(self, connection: Connection, leaves: Sequence[bytes]) -> None:
        self._found: dict[bytes, tuple[bytes, JSON]] = {}
        self._chains: dict[bytes, tuple[JSON, ...]] = {ROOT: ()}
        wanted = set(leaves) - {ROOT}
        while wanted:
            above: set[bytes] = set()
            for some in _some(list(wanted)):
                for row in connection.execute(select(tables.nodes).where(tables.nodes.c.id.in_(some))):
                    self._found[row.id] = (row.parent, json.loads(expand(row.body)))
                    above.add(row.parent)
            wanted = above - self._found.keys() - {ROOT}

    def one(self, node: bytes) -> JSON:
        return self._found[node][1]

    def chain(self, node: bytes) -> tuple[JSON, ...]:
        path: list[bytes] = []
        while node not in self._chains:
            path.append(node)
            node = self._found[node][0]
        messages = self._chains[node]
        for step in reversed(path):
            messages = (*messages, self._found[step][1])
            self._chains[step] = messages
        return messages
