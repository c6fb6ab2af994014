"""Counts calls, runs and costs of a period for `art-patch report`, and the store's groups for `art-patch groups`.

A report is read in one transaction, so its numbers agree with each other. A call belongs to the period in which it
started, a run to the period in which its last call ended. Missing values are never counted as zero: a run without a
score has the reward `None`, and calls without token counts are counted separately.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select, true

from art_patch.store.backends.database import Part
from art_patch.store.ledger.route import route_of
from art_patch.store.queries import costs
from art_patch.store.queries.loading import rows_in
from art_patch.store.schema import tables
from art_patch.store.schema.codec import RUN_KEY
from art_patch.store.upstream_models import newest_change
from art_patch.types import COPIES, RunValue, Served, Usage

_C, _T, _S = tables.calls.c, tables.trajectories.c, tables.scores.c
_PAGE = 5_000


@dataclass(slots=True)
class _Counted:
    calls: int = 0
    failed: int = 0
    unmetered: int = 0
    # 8 bytes per call; a list of Python floats takes four times as much, and a period may have a million calls.
    latencies_ms: "array[float]" = field(default_factory=lambda: array("d"))
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


# State of a group that only holds the run whose copies are siblings in other groups -> how those groups came about.
SOURCES: Mapping[str, str] = {"in spans": "sibling_spans", "resampled": "resampled", "branched": "branched"}


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Numbers of groups and grouped runs; a group of one run whose copies are siblings elsewhere is no group."""

    states: Mapping[str, int]  # number of groups by state
    held_out: int  # number of groups that are kept for the gate
    ways: Mapping[str, int]  # number of groups by the way in which their siblings were found (`Group.how`)
    sizes: Mapping[int, int]  # number of groups by number of siblings
    runs: Mapping[str, int]  # number of the app's own runs that are in a group, or whose copies are, by `Group.how`
    all_runs: int  # number of all runs of the app, with or without a group


@dataclass(frozen=True, slots=True)
class Learned:
    """What a policy learned from, as the store still knows it, and what it has answered since."""

    groups: tuple[str, ...]  # ids of the groups that it was trained on, erased ones too
    groups_there: int  # number of these that the store still holds
    runs: tuple[str, ...]  # ids of the runs with answers that it was trained on
    alone: int  # number of runs in no group that it was trained on, such as corrected ones
    judges: tuple[tuple[str, str | None], ...]  # model and rubric of the judges that scored these groups
    answered: int  # number of the app's calls that it has answered
    copies: int  # number of copies that it has answered in the background, or to make siblings


@dataclass(frozen=True, slots=True)
class Recent:
    """How a policy, or upstream (`None`), has answered since some moment; without copies and imported runs."""

    policy: str | None
    calls: int = 0
    calls_not_ok: int = 0
    latency_ms: float | None = None  # mean of the calls that succeeded
    prompt_tokens: int = 0  # of its calls, as far as servers told them
    completion_tokens: int = 0
    runs: int = 0  # in which it answered all calls
    known: int = 0  # of these, the ones that failed or have a reward
    succeeded: int = 0  # of these, the ones that did not fail and have a reward of `SUCCESS` or more
    rewarded: int = 0
    reward: float | None = None  # mean of the runs that have one


SUCCESS = 0.5
"""Smallest reward of a run that succeeded, as in `art-patch analytics`."""


class Reports(Part):
    """Counts for `art-patch report`, `groups`, `policies show` and for metrics."""

    def recent(self, *, since: float, until: float = math.inf) -> tuple[Recent, ...]:
        """Return how upstream and each policy have answered since then, upstream first.

        The database sums up, in two statements, so that a server may ask while it answers calls.
        """
        count, ok = func.count(), _C.status == "ok"
        calls = (
            select(_C.policy, count, count.filter(~ok), func.avg(_C.duration_ms).filter(ok))
            .add_columns(*(func.coalesce(func.sum(each), 0) for each in (_C.prompt_tokens, _C.completion_tokens)))
            .where(_C.started_at >= since, _C.started_at < until, _C.shadow_of.is_(None))
            .group_by(_C.policy)
        )
        one = _recent_runs(since, until)
        failed, known = one.failed > 0, or_(one.failed > 0, one.reward.is_not(None))
        runs = select(
            one.policy, count, count.filter(known), count.filter(~failed, one.reward >= SUCCESS),
            func.count(one.reward), func.avg(one.reward),
        ).group_by(one.policy)  # fmt: skip
        found: defaultdict[str | None, dict[str, Any]] = defaultdict(dict)
        with self._database.read() as connection:
            for policy, *values, prompt, completion in connection.execute(calls):
                found[policy] |= zip(("calls", "calls_not_ok", "latency_ms"), values, strict=True)
                found[policy] |= {"prompt_tokens": int(prompt), "completion_tokens": int(completion)}
            for policy, *values in connection.execute(runs):
                found[policy] |= zip(("runs", "known", "succeeded", "rewarded", "reward"), values, strict=True)
        return tuple(Recent(policy, **found[policy]) for policy in sorted(found, key=lambda name: name or ""))

    def learned(self, policy: str) -> Learned:
        """Return from which groups and runs a policy learned, and how many calls it has answered."""
        trained, rows, s = tables.trainings.c, tables.trained_rows.c, tables.scores.c
        with self._database.read() as connection:
            keys = connection.scalars(select(trained.group_id).where(trained.policy == policy)).all()
            groups = sorted(key for key in keys if not key.startswith(RUN_KEY))
            its = frozenset(groups)
            there = sum(1 for _ in rows_in(connection, select(tables.groups.c.id), tables.groups.c.id, groups))
            runs = connection.scalars(select(rows.trajectory_id).where(rows.policy == policy).distinct()).all()
            # By run, because the table of scores has no index of groups.
            of_runs = select(s.judge, s.rubric, s.group_id).where(s.judge.is_not(None)).distinct()
            judges = {
                (judge, rubric)
                for judge, rubric, group in rows_in(connection, of_runs, s.trajectory_id, sorted(runs))
                if group in its
            }
            counts = select(func.count().filter(_C.shadow_of.is_(None)), func.count(_C.shadow_of))
            answered, copies = connection.execute(counts.where(_C.policy == policy)).one()
        return Learned(
            groups=tuple(groups),
            groups_there=there,
            runs=tuple(sorted(runs)),
            alone=len(keys) - len(groups),
            judges=tuple(sorted(judges, key=lambda each: (each[0], each[1] or ""))),
            answered=answered,
            copies=copies,
        )

    def spent(self, *, since: float, until: float) -> Usage:
        """Return what costs of the period are counted from: `usage` without latencies, fallbacks and runs.

        The database sums up, so that a server may ask while it answers.
        """
        with self._database.read() as connection:
            served = costs.paid(connection, since, until)
            return Usage(since=since, until=until, served=served, **costs.others(connection, since, until))

    def usage(self, *, since: float, until: float) -> Usage:
        """Return the calls, runs and costs of the period from `since` until `until`, seconds since the epoch."""
        route = route_of(self._database.control())  # in a transaction of its own, so not in the snapshot
        with self._database.read() as connection:
            change = newest_change(connection, until=until)
            changed_at = -math.inf if change is None else change.at
            served, now, fell_back = _calls(connection, since, until, changed_at)
            runs, mixed, outdated = _runs(connection, since, until, changed_at)
            return Usage(
                since=since,
                until=until,
                champion=route.champion,
                mode=route.mode,
                served=served,
                fell_back=fell_back,
                runs=runs,
                mixed=mixed,
                upstream_change=change if changed_at >= since else None,
                upstream_now=now if changed_at >= since else None,
                outdated=outdated,
                **costs.others(connection, since, until),
            )

    def groups(self) -> GroupStats:
        """Count the groups of the store by state, origin and size, and the runs that are in them."""
        groups, own = tables.groups, _T.origin.not_in(COPIES)
        query = (
            select(groups.c.state, groups.c.how, groups.c.held_out, func.count(_T.id), func.count().filter(own))
            .join_from(groups, tables.trajectories, _T.group_id == groups.c.id)
            .group_by(groups.c.id, groups.c.state, groups.c.how, groups.c.held_out)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).all()
            all_runs = connection.scalar(select(func.count()).select_from(tables.trajectories).where(own)) or 0
        counted = [(state, how, held_out, size) for state, how, held_out, size, _ in rows if state not in SOURCES]
        in_groups: Counter[str] = Counter()
        for state, how, _, _, own_runs in rows:
            in_groups[SOURCES.get(state, how)] += own_runs
        return GroupStats(
            states=Counter(state for state, _, _, _ in counted),
            held_out=sum(held_out for _, _, held_out, _ in counted),
            ways=Counter(how for _, how, _, _ in counted),
            sizes=dict(sorted(Counter(size for _, _, _, size in counted).items())),
            runs=+in_groups,
            all_runs=all_runs,
        )


def _calls(
    connection: Connection, since: float, until: float, changed_at: float
) -> tuple[tuple[Served, ...], Served, dict[str, int]]:
    """Return the calls by policy, those of upstream since it changed, and the fallbacks by reason."""
    query = select(
        _C.policy, _C.requested_model, _C.status, _C.duration_ms, _C.prompt_tokens, _C.completion_tokens, _C.fallback,
        _C.started_at,
    ).where(_C.started_at >= since, _C.started_at < until, _C.shadow_of.is_(None))  # fmt: skip
    # Row by row instead of sums in SQL: the report needs percentiles of the latencies, which SQLite cannot compute.
    found: defaultdict[str | None, _Counted] = defaultdict(_Counted)
    now = _Counted()
    fell_back: Counter[str] = Counter()
    for row in connection.execute(query.execution_options(yield_per=_PAGE)):
        _count(found[row.policy], row)
        if changed_at >= since and row.policy is None and row.started_at >= changed_at:
            _count(now, row)
        if row.fallback is not None:
            fell_back[row.fallback] += 1
    served = [_served(policy, one) for policy, one in found.items()]
    served.sort(key=lambda each: (-each.calls, each.policy or ""))
    return tuple(served), _served(None, now), dict(fell_back.most_common())


def _count(one: _Counted, row: Any) -> None:
    one.calls += 1
    if row.status == "error":
        one.failed += 1
        return
    if row.status == "ok":
        one.latencies_ms.append(row.duration_ms)
    if not row.prompt_tokens:  # no prompt is empty, so 0 means that the server sent no usage
        one.unmetered += 1
        return
    prompt, completion = one.tokens.get(row.requested_model, (0, 0))
    one.tokens[row.requested_model] = (prompt + row.prompt_tokens, completion + row.completion_tokens)


def _served(policy: str | None, one: _Counted) -> Served:
    return Served(policy, one.calls, one.failed, tuple(sorted(one.latencies_ms)), one.tokens, one.unmetered)


def _runs(
    connection: Connection, since: float, until: float, changed_at: float
) -> tuple[tuple[RunValue, ...], int, int]:
    """Return the values of runs, the number of mixed ones, and that of upstream's runs that an earlier model began."""
    within = and_(_T.last_call_at >= since, _T.last_call_at < until)
    query = (
        select(_T.id, _T.origin, _T.group_id, func.count(), func.count(_C.policy), func.min(_C.policy))
        .add_columns(func.max(_C.policy), func.min(_C.started_at))
        .join_from(tables.trajectories, tables.calls, _C.trajectory_id == _T.id)
        .where(within)
        .group_by(_T.id, _T.origin, _T.group_id)
        .order_by(_T.id)
    )
    rewards, judged = _scores(connection, within)
    runs: list[RunValue] = []
    mixed = outdated = 0
    for key, origin, group_id, calls, ours, first, last, began in connection.execute(query):
        # `count(policy)` skips upstream's calls, and `min` and `max` differ if there are two policies.
        if (0 < ours < calls) or first != last:
            mixed += 1
        elif first is None and began < changed_at:
            outdated += 1
        else:
            runs.append(RunValue(first, rewards.get(key), judged.get(key), group_id, origin in COPIES))
    return tuple(runs), mixed, outdated


def _recent_runs(since: float, until: float) -> Any:
    """Return the columns of a subquery with a row for each run of one policy: policy, failures and reward."""
    its, newest = _S.trajectory_id == _T.id, (_S.at.desc(), _S.id.desc())

    def score(name: str, *conditions: ColumnElement[bool]) -> Any:
        found = select(_S.value).where(its, _S.name == name, *conditions).order_by(*newest).limit(1)
        return found.correlate(tables.trajectories).scalar_subquery()

    # As in `_scores`: what users or code gave, else what was judged in the group that the run is in.
    judged = _S.group_id == _T.group_id
    reward = func.coalesce(
        score("reward", _S.source.in_(("user", "code"))),
        score("reward", _S.source == "combined", judged),
        score("ruler", _S.source == "ruler", judged),
    )
    failed = func.count().filter(or_(_C.status == "error", _T.error.is_not(None)))
    query = (
        select(func.min(_C.policy).label("policy"), failed.label("failed"), reward.label("reward"))
        .join_from(tables.trajectories, tables.calls, _C.trajectory_id == _T.id)
        .where(_T.last_call_at >= since, _T.last_call_at < until, _T.origin.not_in((*COPIES, "imported")))
        .group_by(_T.id, _T.group_id)
        .having(
            or_(func.count(_C.policy) == 0, func.count(_C.policy) == func.count()),
            func.coalesce(func.min(_C.policy) == func.max(_C.policy), true()),
        )
    )
    return query.subquery().c


def _scores(connection: Connection, within: ColumnElement[bool]) -> tuple[dict[str, float], dict[str, float]]:
    """Return by run the newest rewards of users or code and the newest judged ones, as in `rewards.combine`."""
    given = and_(_S.name == "reward", _S.source.in_(("user", "code")))
    combined = and_(_S.name == "reward", _S.source == "combined", _S.group_id == _T.group_id)
    ranked = and_(_S.name == "ruler", _S.source == "ruler", _S.group_id == _T.group_id)
    query = (
        select(_S.trajectory_id, _S.source, _S.value)
        .join_from(tables.scores, tables.trajectories, _S.trajectory_id == _T.id)
        .where(within, or_(given, combined, ranked))
        .order_by(_S.at, _S.id)
    )
    rewards: dict[str, float] = {}
    judged: dict[str, dict[str, float]] = defaultdict(dict)
    for key, source, value in connection.execute(query):
        if source in ("user", "code"):
            rewards[key] = value
        else:
            judged[key][source] = value
    return rewards, {key: values["combined" if "combined" in values else "ruler"] for key, values in judged.items()}
