"""Reads from the store in short transactions: trajectories and groups for the job and the command line, and evidence.

Evidence is what a decision rests on: the calls and scores of a shadow or canary test, and users' feedback. The calls of
a test are read without texts. If a policy failed and upstream answered in its place, the call counts for the policy
that failed. `Call.fallback` tells which one it was: it begins with the name of the policy under test, and with no name
if the champion failed. If the engine was full, the call counts for no policy: its `policy` is empty.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, and_, exists, func, or_, select

from art_patch.store.backends.database import Part
from art_patch.store.queries.loading import load_calls, records_of, rows_in
from art_patch.store.schema import tables
from art_patch.trajectories import followed
from art_patch.types import (
    COPIES,
    ENGINE_FULL,
    JSON,
    AppReport,
    ArmCall,
    ArmTraffic,
    Correction,
    Group,
    Score,
    SpanInfo,
    Trajectory,
    TrajectoryInfo,
)

_C, _G, _T = tables.calls.c, tables.groups.c, tables.trajectories.c


class Reader(Part):
    """Reads trajectories, groups, reports of app processes and counts, for the job and the command line."""

    def trajectories(self, ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """Return the trajectories `ids` with calls, messages, scores and spans, in this order; skip unknown ids."""
        with self._database.read() as connection:  # one snapshot: no call is seen without its trajectory
            query = select(*tables.columns_of(tables.trajectories, TrajectoryInfo))
            infos = {
                row.id: replace(TrajectoryInfo(*row), tags=tuple(row.tags))  # JSON has no tuples
                for row in rows_in(connection, query, _T.id, ids)
            }
            calls = load_calls(connection, ids)
            scores = records_of(connection, tables.scores, Score, "at", ids)
            spans = records_of(connection, tables.spans, SpanInfo, "started_at", ids)
        return tuple(
            Trajectory(infos[key], tuple(calls.get(key, ())), tuple(scores[key]), tuple(spans[key]))
            for key in ids
            if key in infos
        )

    def recent(self, *, limit: int = 20) -> tuple[Trajectory, ...]:
        """Return the newest `limit` trajectories with their calls, newest first."""
        with self._database.read() as connection:
            ids = list(connection.scalars(select(_T.id).order_by(_T.last_call_at.desc()).limit(limit)))
        return self.trajectories(ids)

    def known(self, ids: Sequence[str]) -> frozenset[str]:
        """Return those of the `ids` that belong to trajectories in this store."""
        with self._database.read() as connection:
            return frozenset(key for (key,) in rows_in(connection, select(_T.id), _T.id, ids))

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
        # Copies are put into groups by the step that makes them.
        theirs = select(_T.id).where(_T.group_id.is_(None), _T.origin.not_in(COPIES)).order_by(_T.last_call_at)
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
        with self._database.read() as connection:
            return tuple(connection.scalars(query))[::-1]

    def groups(self, *, state: str, held_out: bool | None = None, limit: int = 1_000) -> tuple[Group, ...]:
        """Return the groups that `group_ids` finds, with their trajectories, sorted from old to new."""
        return self.groups_of(self.group_ids(state=state, held_out=held_out, limit=limit))

    def groups_of(self, ids: Sequence[str]) -> tuple[Group, ...]:
        """Return the groups `ids` with their trajectories, in this order; skip unknown ids."""
        members: dict[str, list[str]] = defaultdict(list)
        with self._database.read() as connection:
            found = {row.id: row for row in rows_in(connection, select(tables.groups), _G.id, ids)}
            query = select(_T.group_id, _T.id).order_by(_T.id)
            for group_id, trajectory_id in rows_in(connection, query, _T.group_id, ids):
                members[group_id].append(trajectory_id)
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
            Group(
                id=row.id,
                scenario_key=row.scenario_key,
                how=row.how,
                held_out=bool(row.held_out),  # SQLite gives 0 or 1
                trajectories=tuple(whole[key] for key in members[row.id] if key in whole),
                followed=after.get(row.id, ()),
            )
            for row in (found[key] for key in ids if key in found)
        )

    def _followed(self, turns: Mapping[str, str]) -> dict[str, tuple[JSON, ...]]:
        """Return the messages that followed each of these calls (ids by any key) in its own run, by the same key."""
        with self._database.read() as connection:
            # The whole run is read, because what followed is in the prompts of its later calls.
            found = rows_in(connection, select(_C.trajectory_id), _C.id, sorted(set(turns.values())))
            runs = sorted({run for (run,) in found})
        calls = {call.id: (run, call) for run in self.trajectories(runs) for call in run.calls}
        return {key: followed(*calls[call_id]) for key, call_id in turns.items() if call_id in calls}

    def arrivals(self, users: Sequence[str]) -> tuple[float | None, dict[str, float]]:
        """Return when the store's first trajectory started (`None` if it is empty), and when each user's first did."""
        own = _T.origin.not_in(COPIES)  # a copy has its original's user, and is made later
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
            .where(_C.started_at >= since, _C.started_at <= until, _T.origin.not_in((*COPIES, "imported")))
        )
        with self._database.read() as connection:
            return connection.scalar(query) or 0

    def apps(self, *, since: float) -> tuple[AppReport, ...]:
        """Return the newest report of each app process that has reported since `since`, newest first."""
        columns, at = tables.columns_of(tables.apps, AppReport), tables.apps.c.at
        with self._database.read() as connection:
            rows = connection.execute(select(*columns).where(at >= since).order_by(at.desc()))
            return tuple(AppReport(*row) for row in rows)

    def counts(self) -> dict[str, Any]:
        """Return the numbers of calls, copies, groups and other rows that `art-patch status` shows, by name."""
        count, own = func.count(), _C.shadow_of.is_(None)
        calls = {
            "calls": count,
            "calls_by_policy": func.count(_C.policy),  # skips NULL, which is upstream
            "calls_fell_back": func.count(_C.fallback),
            "calls_engine_full": count.filter(_C.fallback.like(f"%{ENGINE_FULL}")),
            "calls_not_ok": count.filter(_C.status != "ok"),
            "calls_trainable": count.filter(_C.untrainable.is_(None)),
            "last_call_at": func.max(_C.started_at),
        }
        reasons = select(_C.untrainable, count).where(_C.untrainable.is_not(None), own).group_by(_C.untrainable)
        fell_back = select(_C.fallback, count).where(_C.fallback.is_not(None), own).group_by(_C.fallback)
        with self._database.read() as connection:
            facts = connection.execute(select(*calls.values()).where(own)).one()
            origins = _by(connection, select(_T.origin, count).group_by(_T.origin))
            return dict(zip(calls, facts, strict=True)) | {
                "calls_shadow": origins.get("shadow", 0),
                "calls_resampled": origins.get("resampled", 0),
                "trajectories": sum(number for origin, number in origins.items() if origin not in COPIES),
                "scenarios": connection.scalar(select(count).select_from(tables.scenarios)),
                "scores": connection.scalar(select(count).select_from(tables.scores)),
                "groups": _by(connection, select(_G.state, count).group_by(_G.state)),
                "untrainable": _by(connection, reasons.order_by(count.desc())),
                "fell_back": _by(connection, fell_back.order_by(count.desc()).limit(5)),  # texts of many kinds
                "judge": _spent(connection),
            }


def _by(connection: Connection, query: Any) -> dict[str, int]:
    rows: Any = connection.execute(query).all()
    return dict(rows)


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


LIMIT = 20_000  # newest calls of a test: reading them takes about a second

_GROUPS = 1_000

# Scores in groups of these states are no evidence. While a judge works on a group, its scores are stored before the
# defences have checked them (`formed`); scores of a quarantined group are not trusted.
_UNDEFENDED = ("formed", "quarantined")

_C, _H, _T, _S, _G = tables.calls, tables.choices, tables.trajectories, tables.scores, tables.groups


class Evidence(Part):
    """Queries for the calls and scores of a test, and for what users said about runs."""

    def arm_traffic(
        self, *, challenger: str, champion: str, state: Literal["shadow", "canary"], since: float, limit: int = LIMIT
    ) -> ArmTraffic:
        """Return the calls of the policy under test and of the champion, and the scores of the runs with these calls.

        Args:
            state: `shadow` reads the copies that the policy under test answered and the app's calls that they copy;
                `canary` reads the app's own calls that either policy answered.
            since: when the policy under test came into this state, seconds since the epoch.
            limit: maximum number of calls, newest first: of both policies together in `canary`, of copies in `shadow`.
        """
        with self._database.read() as connection:
            if state == "canary":
                mine = or_(_C.c.policy.in_((challenger, champion)), _C.c.fallback.is_not(None))
                query = _calls().where(_C.c.started_at >= since, _C.c.shadow_of.is_(None), mine)
                rows = connection.execute(query.order_by(_C.c.started_at.desc()).limit(limit)).all()
            else:
                rows = _copies_and_copied(connection, challenger, since, limit)
            # By their end: a call counts when its outcome is known.
            calls = sorted((_call(row, challenger, champion) for row in rows), key=lambda call: (call.at, call.id))
            undefended = exists().where(_G.c.id == _S.c.group_id, _G.c.state.in_(_UNDEFENDED)).correlate(_S)
            runs = sorted({call.trajectory_id for call in calls})
            found = records_of(connection, _S, Score, "at", runs, ~undefended).values()
            changes = _share_changes(connection, challenger, since) if state == "canary" else ()
        scores = sorted((score for its in found for score in its), key=lambda score: (score.at, score.id))
        return ArmTraffic(tuple(calls), tuple(scores), changes)

    def corrections(self, trajectory_ids: Sequence[str]) -> dict[str, list[Correction]]:
        """Return the corrections of each of these trajectories, oldest first, without those that have none."""
        with self._database.read() as connection:
            return dict(records_of(connection, tables.corrections, Correction, "at", trajectory_ids))

    def corrected(self, *, since: float, limit: int) -> tuple[str, ...]:
        """Return ids of trajectories corrected after `since`, newest correction first, without held-out groups."""
        c = tables.corrections.c
        query = (
            select(c.trajectory_id)
            .join(_T, _T.c.id == c.trajectory_id)
            .outerjoin(_G, _G.c.id == _T.c.group_id)  # a corrected run may be in no group
            .where(c.at > since, or_(_G.c.held_out.is_(None), _G.c.held_out.is_(False)))
            .group_by(c.trajectory_id)
            .order_by(func.max(c.at).desc(), c.trajectory_id)  # a run may be corrected more than once
            .limit(limit)
        )
        with self._database.read() as connection:
            return tuple(connection.scalars(query))

    def rewarded_alone(self, *, since: float, limit: int) -> tuple[str, ...]:
        """Return ids of ungrouped trajectories that a user or the app scored after `since`, newest score first."""
        s = _S.c
        query = (
            select(s.trajectory_id)
            .join(_T, _T.c.id == s.trajectory_id)
            .where(s.source.in_(("user", "code")), s.at > since, _T.c.group_id.is_(None))
            .group_by(s.trajectory_id)
            .order_by(func.max(s.at).desc(), s.trajectory_id)
            .limit(limit)
        )
        with self._database.read() as connection:
            return tuple(connection.scalars(query))

    def opinions(self, names: Sequence[str], *, limit: int = _GROUPS) -> tuple[Group, ...]:
        """Return the newest groups with user scores of these names and the judge's, to compare both; without calls."""
        t, s, g = _T.c, _S.c, _G.c
        # The judge's score counts only in the group that the run is in now.
        theirs = and_(s.source == "user", s.name.in_(names))
        of_judge = and_(s.name == "ruler", s.group_id == t.group_id)
        spoken_of = select(t.group_id).join(_S, s.trajectory_id == t.id).where(theirs, t.group_id.is_not(None))
        # Ids are uuid7, so the largest are the newest.
        newest = select(g.id, g.scenario_key, g.how, g.held_out).where(g.id.in_(spoken_of)).order_by(g.id.desc())
        scores = (
            select(t.group_id, *tables.columns_of(_S, Score))
            .join(_S, s.trajectory_id == t.id)
            .where(or_(theirs, of_judge))
            .order_by(t.id, s.at, s.id)
        )
        given: dict[str, dict[str, list[Score]]] = defaultdict(lambda: defaultdict(list))
        with self._database.read() as connection:
            groups = connection.execute(newest.limit(limit)).all()
            for group_id, *values in rows_in(connection, scores, t.group_id, [group.id for group in groups]):
                score = Score(*values)
                given[group_id][score.trajectory_id].append(score)
        return tuple(
            Group(
                group.id,
                group.scenario_key,
                group.how,
                tuple(Trajectory(TrajectoryInfo(key, 0.0), (), tuple(its)) for key, its in given[group.id].items()),
                held_out=bool(group.held_out),
            )
            for group in groups
        )


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
    rows = connection.execute(copies.order_by(_C.c.started_at.desc()).limit(limit)).all()
    copied = sorted({row.shadow_of for row in rows if row.shadow_of is not None})
    # The original may have started before the test did, so it is looked up by id and not by time.
    return [*rows, *rows_in(connection, _calls(), _C.c.id, copied)]


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
        policy="" if (reason or "").endswith(ENGINE_FULL) else asked if fell_back else row.policy or "",
        status=row.status,
        fell_back=fell_back,
        duration_ms=row.duration_ms,
        ttft_ms=row.ttft_ms,
        empty=bool(row.cut) or 0 < row.completion_tokens <= row.choices,
        shadow_of=row.shadow_of,
    )


def _share_changes(connection: Connection, challenger: str, since: float) -> tuple[float, ...]:
    table = tables.promotions
    # A move from canary to canary changes the share.
    changes = select(table.c.at).where(
        table.c.policy == challenger, table.c.from_state == "canary", table.c.to_state == "canary", table.c.at > since
    )
    return tuple(connection.scalars(changes.order_by(table.c.at)))
