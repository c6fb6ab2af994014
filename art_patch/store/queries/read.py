"""Reads trajectories and groups from the store, for the job and the command line, in short read transactions."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, func, select

from art_patch import types
from art_patch.store.backends.database import Part
from art_patch.store.queries.learning import left_out, may_learn
from art_patch.store.queries.loading import load_calls, records_of, rows_in
from art_patch.store.schema import tables
from art_patch.trajectories import followed

_C, _G, _T = tables.calls.c, tables.groups.c, tables.trajectories.c
# Of calls, by the names under which people see the counts.
CALL_COUNTS: dict[str, Any] = {
    "calls": func.count(),
    "calls_by_policy": func.count(_C.policy),  # skips NULL, which is upstream
    "calls_fell_back": func.count(_C.fallback),
    "calls_not_ok": func.count().filter(_C.status != "ok"),
}

APPS_LIVE_S = 180.0
"""A process that runs reports each minute; one that was not heard of for so long has ended."""

DELETED = "deleted"
"""Key of the row of `control` with the numbers of `counts` that erasures and retention have taken away, as JSON."""


class Reader(Part):
    """Reads trajectories, groups, reports of app processes and counts, for the job and the command line."""

    def trajectories(self, ids: Sequence[str]) -> tuple[types.Trajectory, ...]:
        """Return the trajectories `ids` with calls, messages, scores and spans, in this order; skip unknown ids."""
        with self._database.read() as connection:  # one snapshot: no call is seen without its trajectory
            query = select(*tables.columns_of(tables.trajectories, types.TrajectoryInfo))
            infos = {
                # JSON has no tuples, and SQLite no booleans.
                row.id: replace(types.TrajectoryInfo(*row), tags=tuple(row.tags), learn=bool(row.learn))
                for row in rows_in(connection, query, _T.id, ids)
            }
            calls = load_calls(connection, ids)
            scores = records_of(connection, tables.scores, types.Score, "at", ids)
            spans = records_of(connection, tables.spans, types.SpanInfo, "started_at", ids)
        return tuple(
            types.Trajectory(infos[key], tuple(calls.get(key, ())), tuple(scores[key]), tuple(spans[key]))
            for key in ids
            if key in infos
        )

    def recent(self, *, limit: int = 20) -> tuple[types.Trajectory, ...]:
        """Return the newest `limit` trajectories with their calls, newest first."""
        with self._database.read() as connection:
            ids = list(connection.scalars(select(_T.id).order_by(_T.last_call_at.desc()).limit(limit)))
        return self.trajectories(ids)

    def known(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of the `ids` that belong to trajectories in this store."""
        with self._database.read() as connection:
            return frozenset(key for (key,) in rows_in(connection, select(_T.id), _T.id, ids))

    def known_scenarios(self, keys: Collection[str]) -> dict[str, types.KnownScenario]:
        """Return where those of the `keys`, of wordings and of scenarios, belong that an earlier cycle has seen."""
        w, s = tables.wordings.c, tables.scenarios.c
        found: dict[str, types.KnownScenario] = {}
        with self._database.read() as connection:
            of_scenarios = select(s.key, s.key, s.held_out, s.first_seen_at)
            of_wordings = select(w.key, w.scenario_key, w.held_out, w.first_seen_at)
            # Wordings last, because they know more: a scenario's own row says nothing of an older scenario.
            for query, column in ((of_scenarios, s.key), (of_wordings, w.key)):
                for key, scenario_key, held_out, at in rows_in(connection, query, column, sorted(keys)):
                    found[key] = types.KnownScenario(scenario_key, bool(held_out), at)  # SQLite gives 0 or 1
        return found

    def ungrouped(
        self, *, settled_before: float, ended: Sequence[str] = (), limit: int = 10_000
    ) -> tuple[types.Trajectory, ...]:
        """Return complete trajectories that are in no group yet and may be learned from, oldest first.

        Args:
            settled_before: a trajectory is complete if its last call ended by this time, seconds since the epoch.
            ended: ids of trajectories that are complete too, because the caller knows that no call will follow. The
                end of a `trajectory()` block does not prove that: another block with the same id may continue it.
            limit: maximum number of trajectories that are found by `settled_before`; `ended` has no limit.
        """
        # Copies are put into groups by the step that makes them.
        own = (_T.group_id.is_(None), _T.origin.not_in(types.COPIES), may_learn())
        theirs = select(_T.id).where(*own).order_by(_T.last_call_at)
        with self._database.read() as connection:
            ids = list(connection.scalars(theirs.where(_T.last_call_at <= settled_before).limit(limit)))
            query = theirs.where(_T.last_call_at.is_not(None))
            ids += [key for (key,) in rows_in(connection, query, _T.id, ended)]
        return self.trajectories(list(dict.fromkeys(ids)))  # an id may be in both parts

    def group_ids(self, *, state: str, held_out: bool | None = None, limit: int = 1_000) -> tuple[str, ...]:
        """Return ids of the newest `limit` groups in this state, old to new; `held_out=None` returns both kinds."""
        # Ids are uuid7, so their order is the order of time.
        query = select(_G.id).where(_G.state == state).order_by(_G.id.desc()).limit(limit)
        if held_out is not None:
            query = query.where(_G.held_out == held_out)
        return tuple(self._column(query))[::-1]

    def held_out_of_upstream(self, *, since: float) -> int:
        """Return in how many held-out scenarios, of which no group is used up, upstream has answered since then."""
        query = (
            select(func.count(_G.scenario_key.distinct()))
            .join(tables.trajectories, _T.group_id == _G.id)
            .join(tables.calls, _C.trajectory_id == _T.id)
            .where(_G.state == "formed", _G.held_out, may_learn())
            .where(_C.policy.is_(None), _C.status == "ok", _C.started_at >= since)
        )
        return self._scalar(query) or 0

    def groups(self, *, state: str, held_out: bool | None = None, limit: int = 1_000) -> tuple[types.Group, ...]:
        """Return the groups that `group_ids` finds, with their trajectories, sorted from old to new."""
        return self.groups_of(self.group_ids(state=state, held_out=held_out, limit=limit))

    def groups_of(self, ids: Sequence[str]) -> tuple[types.Group, ...]:
        """Return the groups `ids` with their trajectories, in this order; skip unknown ids.

        Members that may not be learned from are left out, and so is a group in which too few others are left.
        """
        members: dict[str, list[str]] = defaultdict(list)
        short: set[str] = set()  # groups that lack a member
        with self._database.read() as connection:
            found = {row.id: row for row in rows_in(connection, select(tables.groups), _G.id, ids)}
            query = select(_T.group_id, _T.id, may_learn()).order_by(_T.id)
            for group_id, trajectory_id, learn in rows_in(connection, query, _T.group_id, ids):
                members[group_id] += [trajectory_id] if learn else []
                short |= set() if learn else {group_id}
        # The gate needs only the prompt of a held-out run; all others are compared with one another.
        for key in short & found.keys():
            if len(members[key]) < (1 if found[key].held_out else 2):
                del found[key], members[key]
        # A second snapshot: a member that was erased in between is left out of its group below.
        whole = {t.id: t for t in self.trajectories([key for keys in members.values() for key in keys])}
        # All siblings of a resampled group answer the same turn, so the first call of the first one names it.
        turns = {
            key: call.shadow_of
            for key, row in found.items()
            if row.how == "resampled"
            for member in members[key][:1]
            for call in whole[member].calls[:1]
            if call.shadow_of is not None
        }
        after = self._followed(turns) if turns else {}
        return tuple(
            types.Group(
                id=row.id,
                scenario_key=row.scenario_key,
                how=row.how,
                held_out=bool(row.held_out),  # SQLite gives 0 or 1
                trajectories=tuple(whole[key] for key in members[row.id] if key in whole),
                followed=after.get(row.id, ()),
            )
            for row in (found[key] for key in ids if key in found)
        )

    def members(self, groups: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of all runs in these groups, also of those that may not be learned from."""
        with self._database.read() as connection:
            return tuple(key for (key,) in rows_in(connection, select(_T.id), _T.group_id, groups))

    def _followed(self, turns: Mapping[str, str]) -> dict[str, tuple[types.JSON, ...]]:
        """Return the messages that followed each of these calls (ids by any key) in its own run, by the same key."""
        with self._database.read() as connection:
            # The whole run is read, because what followed is in the prompts of its later calls.
            found = rows_in(connection, select(_C.trajectory_id), _C.id, sorted(set(turns.values())))
            runs = sorted({run for (run,) in found})
        calls = {call.id: (run, call) for run in self.trajectories(runs) for call in run.calls}
        return {key: followed(*calls[call_id]) for key, call_id in turns.items() if call_id in calls}

    def arrivals(self, users: Sequence[str]) -> tuple[float | None, dict[str, float]]:
        """Return when the store's first trajectory started (`None` if it is empty), and when each user's first did."""
        own = _T.origin.not_in(types.COPIES)  # a copy has its original's user, and is made later
        with self._database.read() as connection:
            first = connection.scalar(select(func.min(_T.started_at)).where(own))
            query = select(_T.user_id, func.min(_T.started_at)).where(own).group_by(_T.user_id)
            came = {user: at for user, at in rows_in(connection, query, _T.user_id, sorted(set(users)))}
        return first, came

    def calls_of_apps(self, *, since: float, until: float) -> int:
        """Return how many calls apps started from `since` until `until`, without copies and imported calls."""
        query = (
            select(func.count())
            .select_from(tables.calls.join(tables.trajectories, _T.id == _C.trajectory_id))
            .where(_C.started_at >= since, _C.started_at <= until, _T.origin.not_in((*types.COPIES, "imported")))
        )
        return self._scalar(query) or 0

    def upstream_answers(self) -> bool:
        """Return whether an answer of upstream is on record, to a call of an app or in an imported run."""
        found = select(_C.id).where(_C.policy.is_(None), _C.status == "ok", _C.shadow_of.is_(None))
        return self._scalar(found.limit(1)) is not None

    def apps(self, *, since: float) -> tuple[types.AppReport, ...]:
        """Return the newest report of each app process that has reported since `since`, newest first."""
        columns, at = tables.columns_of(tables.apps, types.AppReport), tables.apps.c.at
        with self._database.read() as connection:
            rows = connection.execute(select(*columns).where(at >= since).order_by(at.desc()))
            # A program that is no app of ours may have written one.
            return tuple(types.AppReport(*row) for row in rows if isinstance(row.facts, Mapping))

    def counts(self) -> dict[str, Any]:
        """Return the numbers of calls, copies, groups and other rows that `art-patch status` shows, by name."""
        return self.counts_and_deleted()[0]

    def counts_and_deleted(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return `counts`, and by how much deletions have lowered them; the judge's names there begin with `judge_`."""
        count, own = func.count(), _C.shadow_of.is_(None)
        calls = CALL_COUNTS | {
            "calls_engine_full": count.filter(_C.fallback.like(f"%{types.ENGINE_FULL}")),
            "calls_trainable": count.filter(_C.untrainable.is_(None)),
            "last_call_at": func.max(_C.started_at),
        }
        reasons = select(_C.untrainable, count).where(_C.untrainable.is_not(None), own).group_by(_C.untrainable)
        fell_back = select(_C.fallback, count).where(_C.fallback.is_not(None), own).group_by(_C.fallback)
        with self._database.read() as connection:
            facts = connection.execute(select(*calls.values()).where(own)).one()
            origins = _by(connection, select(_T.origin, count).group_by(_T.origin))
            deleted = connection.scalar(select(tables.control.c.value).where(tables.control.c.key == DELETED))
            found = dict(zip(calls, facts, strict=True)) | {
                "calls_shadow": origins.get("shadow", 0),
                "calls_resampled": origins.get("resampled", 0),
                "trajectories": sum(number for origin, number in origins.items() if origin not in types.COPIES),
                "scenarios": connection.scalar(select(count).select_from(tables.scenarios)),
                "scores": connection.scalar(select(count).select_from(tables.scores)),
                "groups": _by(connection, select(_G.state, count).group_by(_G.state)),
                "untrainable": _by(connection, reasons.order_by(count.desc())),
                "fell_back": _by(connection, fell_back.order_by(count.desc()).limit(5)),  # texts of many kinds
                "not_learned_from": left_out(connection),
                "judge": spent(connection),
            }
        return found, json.loads(deleted or "{}")


def _by(connection: Connection, query: Any) -> dict[str, int]:
    rows: Any = connection.execute(query).all()
    return dict(rows)


def spent(connection: Connection, groups: Collection[str] | None = None) -> dict[str, Any]:
    """Return what judging cost so far, all of it or that of `groups`.

    `cost_usd` covers calls of known price; `unpriced` counts the others.
    """
    table = tables.judgements.c
    sums = [
        func.coalesce(func.sum(column), 0) for column in (table.calls, table.prompt_tokens, table.completion_tokens)
    ]
    unpriced = func.coalesce(func.sum(table.calls).filter(table.cost_usd.is_(None)), 0)
    query = select(*sums, func.coalesce(func.sum(table.cost_usd), 0.0), unpriced)
    row = connection.execute(query if groups is None else query.where(table.group_id.in_(groups))).one()
    names = ("calls", "prompt_tokens", "completion_tokens", "cost_usd", "unpriced")
    kinds = (int, int, int, float, int)  # PostgreSQL sums whole numbers to decimals
    return {name: kind(value) for name, kind, value in zip(names, kinds, row, strict=True)}
