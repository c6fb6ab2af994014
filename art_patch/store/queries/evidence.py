"""Reads evidence about policies and answers: the calls and scores of a shadow or canary test, and users' feedback.

The calls of a test are read without texts. If a policy failed and upstream answered in its place, the call counts for
the policy that failed. `Call.fallback` tells which one it was: it begins with the name of the policy under test, and
with no name if the champion failed. If the engine was full or could not be reached, or the app's process may ask none,
the call counts for no policy: its `policy` is empty. Beside upstream, a full engine is the policy's own affair, and
upstream's answer is as good as in the other sessions.

A session is what is assigned to a policy by one hash (`routing.target.CallKeys.session`): a `session_id`, else a
trajectory that the app names, else all calls whose conversations open with the same messages. Runs that had begun
before the test are left out of a `canary` test: their calls go on to the champion, whatever the hash says.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, Table, Text, and_, cast, exists, func, or_, select

from art_patch import types
from art_patch.store.backends.database import Part
from art_patch.store.ledger import decisions
from art_patch.store.ledger.route import CONTROL_KEY
from art_patch.store.queries.learning import may_learn
from art_patch.store.queries.loading import records_of, rows_in
from art_patch.store.schema import tables
from art_patch.store.upstream_models import newest_change

# First calls of a test: reading them takes about ten seconds. Not the newest: if evidence slid out of view, each look
# would be another test. A test that gets so many ends, because a harm that comes later would not be seen.
LIMIT = 200_000

# So much of the past a control group's test knows. It is one test all the same: see `Bets.spread`.
CONTROL_S = 28 * 86_400.0

_GROUPS = 1_000
_SECOND_PASSES = 100  # enough to know a judge's noise within a few percent, and few enough to follow its changes

# Scores in groups of these states are no evidence. While a judge works on a group, its scores are stored before the
# defences have checked them (`formed`); scores of a quarantined group are not trusted.
_UNDEFENDED = ("formed", "quarantined")

_C, _H, _T, _S, _G = tables.calls, tables.choices, tables.trajectories, tables.scores, tables.groups
_E, _P = tables.calls.alias("earlier"), tables.promotions

_IS_REPLAY = cast(_T.c.metadata, Text).contains(f'"{types.REPLAY_OF}"')

# Origins of trajectories that the app did not name when it made the calls.
_UNNAMED = ("single", "stitched")


@dataclass(frozen=True, slots=True)
class Lesson:
    """One answer that a policy was trained on; the other fields are as in `TrainedRow`."""

    policy: str
    state: str | None  # of the policy; `None` if the ledger does not know it any more
    call_id: str
    choice: int
    group_id: str
    advantage: float
    weight: float


class Evidence(Part):
    """Queries for the calls and scores of a test, and for what users said about runs."""

    def arm_traffic(
        self,
        *,
        challenger: str,
        champion: str | None,
        state: Literal["shadow", "canary"],
        since: float,
        limit: int = LIMIT,
    ) -> types.ArmTraffic:
        """Return the calls of the policy under test and of the champion, and the scores of the runs with these calls.

        Without a `champion`, the canary is tested against upstream, since it has answered with today's models: the
        calls of its sessions are the champion's.

        `shadow` reads the copies that the policy under test answered and the app's calls that they copy; `canary` reads
        the app's own calls that either policy answered. `since` is when the policy came into this state. `limit` is of
        both policies together in `canary`, of copies in `shadow`, oldest first.
        """
        with self._database.read() as connection:
            shares = _shares(connection, challenger, since) if state == "canary" else ()
            if state == "canary":
                if champion is None and (change := newest_change(connection, until=None)) is not None:
                    since = max(since, change.at)
                mine = or_(_C.c.policy.in_((challenger, champion or challenger)), _C.c.fallback.is_not(None))
                if champion is None:  # upstream answers no run that the job repeats
                    mine = and_(or_(mine, _C.c.in_control_group), ~_IS_REPLAY)
                is_old = exists().where(_E.c.trajectory_id == _C.c.trajectory_id, _E.c.started_at < since)
                query = _calls().where(_C.c.started_at >= since, _C.c.shadow_of.is_(None), mine, ~is_old.correlate(_C))
                rows = connection.execute(query.order_by(_C.c.started_at).limit(limit)).all()
            else:
                rows = _copies_and_copied(connection, challenger, since, limit)
            calls = [
                _call(row, challenger, champion, session) for row, session in zip(rows, _sessions(rows), strict=True)
            ]
            return _traffic(connection, calls, shares, len(rows) < limit)

    def control_traffic(self, *, champion: str, now: float, limit: int = LIMIT) -> types.ArmTraffic:
        """Return the calls of the champion and of the control group since the promotion, and the scores of their runs.

        These are the newest `limit` calls of at most `CONTROL_S`, and of what is kept for so long, since upstream has
        answered with today's models. Calls of runs that began before are left out.
        """
        with self._database.read() as connection:
            promoted = connection.scalar(
                select(func.max(_P.c.at)).where(_P.c.policy == champion, _P.c.to_state == "champion")
            )
            change = newest_change(connection, until=now)  # what was before it was another comparison
            begins = (now if promoted is None else promoted, now - CONTROL_S, _kept_since(connection))
            since = first = max(*begins, 0.0 if change is None else change.at)
            # A canary's too: its sessions go on with the champion when its test ends, and are not the champion's then.
            meant = or_(_C.c.policy.is_not(None), _C.c.fallback.is_not(None), _C.c.in_control_group)
            query = _calls().where(_C.c.started_at >= since, _C.c.shadow_of.is_(None), meant)
            rows = connection.execute(query.order_by(_C.c.started_at.desc()).limit(limit)).all()[::-1]
            if len(rows) == limit:
                first = rows[0].started_at
            is_old = select(_E.c.trajectory_id).where(_E.c.started_at < first)
            out = {key for (key,) in rows_in(connection, is_old, _E.c.trajectory_id, sorted({row[1] for row in rows}))}
            # Runs that the job repeats are no sessions of users, and are never in the control group.
            out.update(connection.scalars(select(_T.c.id).where(_T.c.last_call_at >= first, _IS_REPLAY)))
            kept = [row for row in rows if row.trajectory_id not in out]
            calls = [_control_call(row, champion, session) for row, session in zip(kept, _sessions(kept), strict=True)]
            return _traffic(connection, calls, _champions_shares(connection, first), first == promoted)

    def upstream_since(self, *, now: float | None = None) -> float | None:
        """Return since when upstream's answers are those of today's models; `None` if no model was replaced.

        Older evidence about upstream is of another model. `now` leaves out what a clock that runs ahead has noted.
        """
        change = self.upstream_change(now=now)
        return None if change is None else change.at

    def upstream_change(self, *, now: float | None = None) -> types.UpstreamChange | None:
        """Return the newest replacement of a model of upstream's; `None` if there was none."""
        return self._read(newest_change, until=now)

    def corrections(self, trajectory_ids: Sequence[str]) -> dict[str, list[types.Correction]]:
        """Return the corrections of each of these trajectories, oldest first, without those that have none."""
        with self._database.read() as connection:
            return dict(records_of(connection, tables.corrections, types.Correction, "at", trajectory_ids))

    def lessons(self, trajectory_id: str) -> tuple[Lesson, ...]:
        """Return what policies learned from the answers of this run, in the order of the policies' creation."""
        r, p = tables.trained_rows.c, tables.policies.c
        named = (r.policy, p.state, r.call_id, r.choice, r.group_id, r.advantage, r.weight)
        query = select(*named).outerjoin(tables.policies, p.name == r.policy).where(r.trajectory_id == trajectory_id)
        return tuple(Lesson(*row) for row in self._rows(query.order_by(p.created_at, r.policy, r.call_id, r.choice)))

    def corrected_calls(self, trajectory_ids: Sequence[str]) -> dict[str, str]:
        """Return trajectory id -> id of the call that a person corrected last, if the correction names one."""
        newest = {key: its[-1].call_id for key, its in self.corrections(trajectory_ids).items() if its}
        return {key: call_id for key, call_id in newest.items() if call_id}

    def corrected(self, *, since: float, limit: int) -> tuple[str, ...]:
        """Return ids of trajectories corrected after `since`, newest correction first, without held-out groups."""
        # A corrected run may be in no group.
        held_out = exists().where(_G.c.id == _T.c.group_id, _G.c.held_out)
        return tuple(self._column(_spoken_of(tables.corrections, since, limit).where(~held_out)))

    def rewarded_alone(self, *, since: float, limit: int) -> tuple[str, ...]:
        """Return ids of ungrouped trajectories that a user or the app scored after `since`, newest score first."""
        given = _S.c.source.in_(("user", "code")), _T.c.group_id.is_(None)
        return tuple(self._column(_spoken_of(_S, since, limit).where(*given)))

    def second_passes(self, *, limit: int = _SECOND_PASSES) -> tuple[types.Judgement, ...]:
        """Return the newest judgements of groups that a judge was asked about a second time, newest first."""
        j = tables.judgements
        query = select(*tables.columns_of(j, types.Judgement)).where(j.c.purpose == "second pass", j.c.state == "ok")
        return tuple(types.Judgement(*row) for row in self._rows(query.order_by(j.c.at.desc()).limit(limit)))

    def opinions(self, names: Sequence[str], *, limit: int = _GROUPS) -> tuple[types.Group, ...]:
        """Return the newest groups with user scores of these names and the judge's, to compare both; without calls."""
        t, s, g = _T.c, _S.c, _G.c
        # The judge's score counts only in the group that the run is in now.
        theirs = and_(s.source == "user", s.name.in_(names), may_learn())
        of_judge = and_(s.name == "ruler", s.group_id == t.group_id)
        spoken_of = select(t.group_id).join(_S, s.trajectory_id == t.id).where(theirs, t.group_id.is_not(None))
        # Ids are uuid7, so the largest are the newest.
        newest = select(g.id, g.scenario_key, g.how, g.held_out).where(g.id.in_(spoken_of)).order_by(g.id.desc())
        scores = (
            select(t.group_id, *tables.columns_of(_S, types.Score))
            .join(_S, s.trajectory_id == t.id)
            .where(or_(theirs, of_judge))
            .order_by(t.id, s.at, s.id)
        )
        given: dict[str, dict[str, list[types.Score]]] = defaultdict(lambda: defaultdict(list))
        with self._database.read() as connection:
            groups = connection.execute(newest.limit(limit)).all()
            for group_id, *values in rows_in(connection, scores, t.group_id, [group.id for group in groups]):
                score = types.Score(*values)
                given[group_id][score.trajectory_id].append(score)
        return tuple(
            types.Group(
                group.id,
                group.scenario_key,
                group.how,
                tuple(_scored(key, its) for key, its in given[group.id].items()),
                held_out=bool(group.held_out),
            )
            for group in groups
        )


def _spoken_of(table: Table, since: float, limit: int) -> Select[Any]:
    """Return the query for the runs that have a row of this table after `since`, those with the newest row first."""
    its = table.c
    runs = select(its.trajectory_id).join(_T, _T.c.id == its.trajectory_id).where(its.at > since, may_learn())
    return runs.group_by(its.trajectory_id).order_by(func.max(its.at).desc(), its.trajectory_id).limit(limit)


def _scored(key: str, scores: Sequence[types.Score]) -> types.Trajectory:
    return types.Trajectory(types.TrajectoryInfo(key, 0.0), (), tuple(scores))


def _traffic(
    connection: Connection, calls: Sequence[types.ArmCall], shares: tuple[tuple[float, float], ...], is_whole: bool
) -> types.ArmTraffic:
    """Return the calls with the scores of their runs, by their end: a call counts when its outcome is known."""
    undefended = exists().where(_G.c.id == _S.c.group_id, _G.c.state.in_(_UNDEFENDED)).correlate(_S)
    runs = sorted({call.trajectory_id for call in calls})
    found = records_of(connection, _S, types.Score, "at", runs, ~undefended).values()
    scores = sorted((score for its in found for score in its), key=lambda score: (score.at, score.id))
    return types.ArmTraffic(tuple(sorted(calls, key=lambda call: (call.at, call.id))), tuple(scores), shares, is_whole)


def _calls() -> Select[*tuple[Any, ...]]:
    its = _H.c.call_id == _C.c.id
    choices = select(func.count()).select_from(_H).where(its).correlate(_C).scalar_subquery()
    return select(
        _C.c.id, _C.c.trajectory_id, _C.c.session_id, _T.c.group_id, _C.c.started_at, _C.c.duration_ms, _C.c.ttft_ms,
        _C.c.policy, _C.c.status, _C.c.fallback, _C.c.completion_tokens, _C.c.shadow_of, _C.c.prompt, _T.c.origin,
        _C.c.in_control_group,
        choices.label("choices"), exists().where(its, _H.c.finish_reason == "length").correlate(_C).label("cut"),
    ).join(_T, _T.c.id == _C.c.trajectory_id)  # fmt: skip


def _copies_and_copied(connection: Connection, challenger: str, since: float, limit: int) -> list[Row[Any]]:
    copies = _calls().where(_C.c.started_at >= since, _C.c.policy == challenger, _T.c.origin == "shadow")
    rows = connection.execute(copies.order_by(_C.c.started_at).limit(limit)).all()
    copied = sorted({row.shadow_of for row in rows if row.shadow_of is not None})
    # The original may have started before the test did, so it is looked up by id and not by time.
    return [*rows, *rows_in(connection, _calls(), _C.c.id, copied)]


def _sessions(rows: Sequence[Row[Any]]) -> list[str]:
    """Return the session of each call. Copies are not assigned, so they keep the trajectories of their originals."""
    opening: dict[str, bytes] = {}  # trajectory -> prompt of its first call
    if not any(row.shadow_of for row in rows):
        for row in sorted(rows, key=lambda row: row.started_at):
            if row.origin in _UNNAMED:
                opening.setdefault(row.trajectory_id, row.prompt)
    its = (opening.get(row.trajectory_id) for row in rows)
    return [
        row.session_id or (hash_.hex() if hash_ else row.trajectory_id) for row, hash_ in zip(rows, its, strict=True)
    ]


def _call(row: Row[Any], challenger: str, champion: str | None, session: str) -> types.ArmCall:
    reason: str | None = row.fallback if row.policy is None else None
    fell_back = reason is not None
    if champion is None and reason is None and row.in_control_group:
        return _arm_call(row, session, types.UPSTREAM_ARM, fell_back=False, down=False)
    asked = challenger if reason is not None and reason.startswith(f"{challenger}: ") else champion or ""
    why = (reason or "").removeprefix(f"{challenger}: ")
    if champion is None and why == types.ENGINE_FULL:
        # Left out, long sessions and busy times would be missing on one side alone: upstream's sessions meet no engine.
        return _arm_call(row, session, asked, fell_back=False, down=False)
    # The breaker of the policy under test opens by its own failures alone, the champion's if the engine fails.
    down = why.startswith(types.UNREACHABLE) or (why == types.LEFT_ALONE and asked == champion)
    policy = "" if down or why in (types.ENGINE_FULL, types.REFUSED) else asked if fell_back else row.policy or ""
    return _arm_call(row, session, policy, fell_back, down)


def _control_call(row: Row[Any], champion: str, session: str) -> types.ArmCall:
    """Return a call as it was assigned: to the champion, to the control group, or to a policy under test."""
    if row.in_control_group:
        return _arm_call(row, session, types.UPSTREAM_ARM, fell_back=False, down=False)
    if row.policy is not None:
        return _arm_call(row, session, row.policy, fell_back=False, down=False)
    reason = str(row.fallback)
    asked, _, why = reason.partition(": ")
    if "@" in asked and asked.rpartition("@")[2].isdigit():  # meant for a policy under test
        # What befell it in a session that the champion had begun is no failure of the champion's, and keeps the session
        # in: a session of the control group cannot meet it.
        down = why.startswith(types.UNREACHABLE)
        return _arm_call(row, session, "" if down else asked, fell_back=False, down=down)
    down = reason.startswith(types.UNREACHABLE) or reason == types.LEFT_ALONE
    # What users get counts: if the engine is full, upstream's answer is as good as in the control group.
    meant_for = "" if down or reason == types.REFUSED else champion
    return _arm_call(row, session, meant_for, reason != types.ENGINE_FULL, down)


def _arm_call(row: Row[Any], session: str, policy: str, fell_back: bool, down: bool) -> types.ArmCall:
    return types.ArmCall(
        id=row.id,
        trajectory_id=row.trajectory_id,
        session=session,
        group_id=row.group_id,
        at=row.started_at + row.duration_ms / 1000,
        policy=policy,
        status=row.status,
        fell_back=fell_back,
        duration_ms=row.duration_ms,
        ttft_ms=row.ttft_ms,
        empty=bool(row.cut) or 0 < row.completion_tokens <= row.choices,
        shadow_of=row.shadow_of,
        down=down,
    )


def _shares(connection: Connection, challenger: str, since: float) -> tuple[tuple[float, float], ...]:
    table = tables.promotions
    moves = select(table.c.at, table.c.metrics).where(
        table.c.policy == challenger, table.c.to_state == "canary", table.c.at >= since
    )
    return tuple((at, metrics["percent"]) for at, metrics in connection.execute(moves.order_by(table.c.at, table.c.id)))


def _kept_since(connection: Connection) -> float:
    """Return since when all calls are there that were not erased for somebody: older ones may have been pruned."""
    its = tables.audit.c
    prunes = connection.execute(select(its.at, its.detail).where(its.action == "prune")).all()
    ages = [at - detail["older_than_s"] for at, detail in prunes if detail["older_than_s"] is not None]
    # What is oldest now was not pruned; whatever came before it may have been.
    if any(detail["keep"] is not None for _, detail in prunes):
        ages.append(connection.scalar(select(func.min(_C.c.started_at))) or 0.0)
    return max(ages, default=0.0)


def _champions_shares(connection: Connection, first: float) -> tuple[tuple[float, float], ...]:
    """Return which percentage the champion has of its own sessions and the control group's, `first` and then on."""
    changes: list[tuple[float, int, float]] = [
        (at, 0, percent) for at, percent in json.loads(decisions.control_of(connection, CONTROL_KEY) or "[]")
    ]
    moves = connection.execute(select(_P.c.at, _P.c.to_state, _P.c.from_state, _P.c.metrics).order_by(_P.c.id))
    for at, to_state, from_state, metrics in moves:
        if to_state == "canary" or from_state == "canary":
            changes.append((at, 1, metrics.get("percent", 0.0) if to_state == "canary" else 0.0))
    shares, now = list[tuple[float, float]](), [0.0, 0.0]  # of the control group, and of a canary among the others
    before = 100.0
    for at, which, percent in sorted(changes, key=lambda change: change[0]):
        now[which] = percent
        control = now[0] / 100
        champions = (1 - control) * (1 - now[1] / 100)
        share = 100 * champions / (champions + control) if champions + control else 100.0
        if at <= first:
            before = share
        else:
            shares.append((at, share))
    return ((first, before), *shares)
