"""Finds trajectories for a person: filters, pages, summaries without messages, and two policies side by side.

Trajectories are sorted by the end of their last call and by id, newest first; those without calls come last. A page is
requested with the last entry of the page before it (`after`), not with a number. So every page takes the same time to
read, and new trajectories do not shift the pages.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, Subquery, Text, and_, cast, exists, func, or_, select

from art_patch.store.backends.database import Part
from art_patch.store.queries.loading import load_calls, openings_of, rows_in
from art_patch.store.schema import tables
from art_patch.types import COPIES, Call

PAGE = 200

_T, _C, _S, _G = tables.trajectories.c, tables.calls.c, tables.scores.c, tables.groups.c

Sort = Literal["newest", "reward", "latency"]

# The end of a page: when the last call of its last trajectory ended, and the trajectory's id.
Cursor = tuple[float | None, str]


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on trajectories, all of which a trajectory must meet. A field that is `None` is no condition."""

    user: str | None = None
    session: str | None = None
    scenario: str | None = None  # the scenario's key, as the app gave it or as grouping assigned it
    group: str | None = None  # the group's id, or the key that the app gave to `group()`
    tag: str | None = None
    name: str | None = None
    # The trajectory's origin, as in `TrajectoryInfo`; `None` leaves copies out unless `shadows` is set.
    origin: str | None = None
    policy: str | None = None  # the policy (`NAME@STEP`, or `upstream`) that answered at least one of the calls
    since: float | None = None  # the last call ended at or after this time, seconds since the epoch
    until: float | None = None  # the last call ended before this time
    min_reward: float | None = None  # the trajectory has a reward, and it is at least this
    max_reward: float | None = None  # the trajectory has a reward, and it is at most this
    status: str | None = None  # `error` selects trajectories whose block or one of whose calls failed, `ok` all others
    # `True` selects trajectories with at least one call that can be trained on, `False` all others.
    trainable: bool | None = None
    untrainable: str | None = None  # the reason why a call cannot be trained on holds this text, in any case
    model: str | None = None  # the app asked for this model in a call, or it answered one
    error: str | None = None  # the error of the trajectory or of a call holds this text, in any case
    slower_than_s: float | None = None  # a call took at least so many seconds
    shadows: bool = False  # whether copies that the app never saw are included


@dataclass(frozen=True, slots=True)
class Summary:
    """A trajectory as one line of a list, without its messages; fields without a comment are as in `TrajectoryInfo`."""

    id: str
    started_at: float
    last_call_at: float | None  # end of the last call, seconds since the epoch; `None` without calls
    origin: str
    name: str | None
    user_id: str | None
    session_id: str | None
    scenario_key: str | None
    group_id: str | None
    tags: tuple[str, ...]
    error: str | None
    calls: int = 0
    failed_calls: int = 0  # number of calls without a complete answer
    prompt_tokens: int = 0
    completion_tokens: int = 0
    slowest_ms: float = 0.0  # duration of the slowest call
    policies: tuple[str, ...] = ()  # names of the policies that answered the calls; `upstream` stands for the provider
    trainable_calls: int = 0
    # The reward that training uses; `None` if neither the app, a user nor the judge gave one.
    reward: float | None = None
    scores: int = 0
    opening: str = ""  # first words of the user; empty unless `Browser.summaries` was called with `openings`

    @property
    def status(self) -> str:
        """`error` if the trajectory's block or one of its calls failed, else `ok`."""
        return "error" if self.error is not None or self.failed_calls else "ok"

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the trajectory to the end of its last call; 0 without calls."""
        return max(0.0, (self.last_call_at or self.started_at) - self.started_at)


class Pair(NamedTuple):
    """Two calls with the same messages and tools: `a` was answered by one policy, `b` by the other."""

    a: Call
    b: Call


@dataclass(frozen=True, slots=True)
class GroupHead:
    """A group as the store holds it, without its runs."""

    id: str
    scenario_key: str
    how: str  # how its siblings were found, as in `Group.how`
    held_out: bool
    created_at: float
    state: str
    reason: str | None  # of its state, such as why it is dead or quarantined


@dataclass(frozen=True, slots=True)
class GroupFacts(GroupHead):
    """A group with the ids of all its runs, whether they may be learned from or not."""

    runs: tuple[str, ...]
    trained: tuple[str, ...]  # names of the policies that were trained on it
    judgements: tuple[
        dict[str, Any], ...
    ]  # of its judgements, oldest first: judge, rubric, purpose, state, reason, at, facts


class Browser(Part):
    """Queries for lists of trajectories and groups. They read only the data that a list shows."""

    def ids(self, filter: Filter, *, after: Cursor | None = None, limit: int = PAGE) -> list[Cursor]:
        """Return a page of matching trajectories after the entry `after`, newest first, as (last call's end, id)."""
        conditions = list(_conditions(filter))
        found: list[Cursor] = []
        with self._database.read() as connection:
            if after is None or after[0] is not None:
                query = select(_T.last_call_at, _T.id).where(_T.last_call_at.is_not(None), *conditions)
                query = query.where(*_within(_T.last_call_at, filter))
                if after is not None:
                    at, key = after
                    # `<= at` follows from `before`, but only `<= at` lets the database start inside the index.
                    before = or_(_T.last_call_at < at, and_(_T.last_call_at == at, _T.id < key))
                    query = query.where(_T.last_call_at <= at, before)
                query = query.order_by(_T.last_call_at.desc(), _T.id.desc()).limit(limit)
                found += [(row.last_call_at, row.id) for row in connection.execute(query)]
            if len(found) < limit:
                query = select(_T.id).where(_T.last_call_at.is_(None), *conditions, *_within(_T.started_at, filter))
                if after is not None and after[0] is None:
                    query = query.where(_T.id < after[1])
                query = query.order_by(_T.id.desc()).limit(limit - len(found))
                found += [(None, key) for key in connection.scalars(query)]
        return found

    def moment_of(self, place: int, *, before: float | None = None) -> float | None:
        """Return when the last call of the `place`-th newest run ended, of those before `before`; `None`: are fewer."""
        query = select(_T.last_call_at).where(_T.last_call_at.is_not(None)).order_by(_T.last_call_at.desc())
        if before is not None:
            query = query.where(_T.last_call_at < before)
        return self._scalar(query.offset(place - 1).limit(1))

    def worst(self, filter: Filter, by: Sort, *, among: Sequence[str] | None = None, limit: int = PAGE) -> list[str]:
        """Return the matching trajectories with the lowest rewards (`reward`) or the slowest calls (`latency`) first.

        Those without a reward, or without calls, are left out. With `among`, only these ids are looked at.
        """
        slowest = select(func.max(_C.duration_ms)).where(_C.trajectory_id == _T.id).scalar_subquery()
        value = reward_of() if by == "reward" else -slowest
        found = matching(filter).add_columns(value.label("value")).subquery().c
        ordered = select(found.value, found.id).where(found.value.is_not(None)).order_by(found.value, found.id.desc())
        with self._database.read() as connection:
            if among is None:
                return [row.id for row in connection.execute(ordered.limit(limit))]
            rows = sorted(rows_in(connection, ordered, found.id, among), key=lambda row: row.value)
        return [row.id for row in rows[:limit]]

    def count(self, filter: Filter) -> int:
        """Return how many trajectories in the store match the filter."""
        return self._scalar(matching(filter).with_only_columns(func.count(_T.id))) or 0

    def groups(self, filter: Filter, *, after: str = "", limit: int = PAGE) -> list[tuple[str, str, str, list[str]]]:
        """Return a page of groups after the id `after`, as (id, scenario, `how`, ids of the matching trajectories)."""
        moment = func.coalesce(_T.last_call_at, _T.started_at)
        conditions = (*_conditions(filter), *_within(moment, filter))
        query = (
            select(_T.group_id)
            .where(_T.group_id.is_not(None), _T.group_id > after, *conditions)
            .group_by(_T.group_id)
            .order_by(_T.group_id)
            .limit(limit)
        )
        with self._database.read() as connection:
            ids = list(connection.scalars(query))
            facts = {row.id: row for row in connection.execute(select(tables.groups).where(_G.id.in_(ids)))}
            members: dict[str, list[str]] = defaultdict(list)
            of_these = select(_T.group_id, _T.id).where(_T.group_id.in_(ids), *conditions).order_by(_T.id)
            for group_id, trajectory_id in connection.execute(of_these):
                members[group_id].append(trajectory_id)
        return [(key, facts[key].scenario_key, facts[key].how, members[key]) for key in ids if key in facts]

    def groups_like(self, prefix: str, *, limit: int = 11) -> tuple[GroupFacts, ...]:
        """Return at most `limit` groups whose ids begin with `prefix`; only that one if it is an id itself."""
        trained, judged = tables.trainings.c, tables.judgements.c
        names = ("judge", "rubric", "purpose", "state", "reason", "at", "facts")
        # As in `resolve`: not LIKE.
        query = select(tables.groups).where(func.substr(_G.id, 1, len(prefix)) == prefix).order_by(_G.id).limit(limit)
        found: list[GroupFacts] = []
        with self._database.read() as connection:
            whole = connection.execute(select(tables.groups).where(_G.id == prefix)).all()
            for row in whole or connection.execute(query).all():
                runs = connection.scalars(select(_T.id).where(_T.group_id == row.id).order_by(_T.id)).all()
                by = connection.scalars(select(trained.policy).where(trained.group_id == row.id)).all()
                columns = [judged[name] for name in names]
                judgements = connection.execute(select(*columns).where(judged.group_id == row.id).order_by(judged.at))
                found.append(
                    GroupFacts(
                        row.id, row.scenario_key, row.how, bool(row.held_out), row.created_at, row.state, row.reason,
                        tuple(runs), tuple(sorted(by)), tuple(dict(each) for each in judgements.mappings()),
                    )
                )  # fmt: skip
        return tuple(found)

    def resolve(self, prefix: str, *, limit: int = 11) -> list[str]:
        """Return at most `limit` trajectory ids that begin with `prefix`; only that one if it is an id itself."""
        with self._database.read() as connection:
            # An id that an app chose may be the beginning of another one, and must be reachable all the same.
            whole = connection.scalar(select(_T.id).where(_T.id == prefix))
            if whole is not None:
                return [whole]
            # Not LIKE: ids that apps choose may hold its wildcards `_` and `%`, and on SQLite it ignores case.
            query = select(_T.id).where(func.substr(_T.id, 1, len(prefix)) == prefix).order_by(_T.id).limit(limit)
            return list(connection.scalars(query))

    def sessions_like(self, prefix: str, *, limit: int = 11) -> list[str]:
        """Return at most `limit` session ids that begin with `prefix`; only that one if it is an id itself."""
        its = _T.session_id
        with self._database.read() as connection:
            if connection.scalar(select(its).where(its == prefix).limit(1)) is not None:
                return [prefix]
            begins_so = its.is_not(None), func.substr(its, 1, len(prefix)) == prefix  # as in `resolve`: not LIKE
            return list(connection.scalars(select(its).where(*begins_so).distinct().order_by(its).limit(limit)))

    def summaries(self, ids: Sequence[str], *, openings: bool = False) -> list[Summary]:
        """Summarise trajectories in the order of `ids`; skip unknown ones. `openings` is slow: it reads all prompts."""
        columns = tables.columns_of(tables.trajectories, Summary)
        names = [column.name for column in columns]
        sums = {
            "calls": func.count(),
            "failed_calls": func.count().filter(_C.status != "ok"),
            "trainable_calls": func.count().filter(_C.untrainable.is_(None)),
            "prompt_tokens": func.sum(_C.prompt_tokens),
            "completion_tokens": func.sum(_C.completion_tokens),
        }
        slowest = func.max(_C.duration_ms)
        found: dict[str, dict[str, Any]] = {}
        with self._database.read() as connection:
            for *values, reward in rows_in(connection, select(*columns, reward_of()), _T.id, ids):
                one = dict(zip(names, values, strict=True)) | {"reward": reward}
                found[one["id"]] = one | {"tags": tuple(one["tags"])}
            numbers_of = _C.trajectory_id, _C.policy
            by_policy = select(*numbers_of, slowest, *sums.values()).group_by(*numbers_of)
            # One row per policy: their sums are added up here, and the policies are listed.
            for key, policy, longest, *numbers in rows_in(
                connection, by_policy.order_by(_C.policy.is_not(None), _C.policy), _C.trajectory_id, ids
            ):
                values = found.get(key, {})
                for name, number in zip(sums, numbers, strict=True):
                    values[name] = values.get(name, 0) + int(number or 0)
                values["slowest_ms"] = max(values.get("slowest_ms", 0.0), longest)
                values["policies"] = (*values.get("policies", ()), policy or "upstream")
            counts = select(_S.trajectory_id, func.count()).group_by(_S.trajectory_id)
            for key, count in rows_in(connection, counts, _S.trajectory_id, ids):
                found.get(key, {})["scores"] = count
            for key, words in openings_of(connection, ids).items() if openings else ():
                found.get(key, {})["opening"] = words
        return [Summary(**found[key]) for key in ids if key in found]

    def answered_by_both(self, a: str | None, b: str | None, *, limit: int) -> tuple[int, tuple[Pair, ...]]:
        """Return how many prompts the policies `a` and `b` both answered, and the newest answers of both to some.

        At most `limit` pairs are returned, newest first; `None` stands for upstream. Two prompts are the same if they
        have the same messages and tools. They then have the same id, which is a hash over all messages.
        """
        one, other = _newest(a), _newest(b)
        both = and_(one.c.prompt == other.c.prompt, one.c.tools.is_not_distinct_from(other.c.tools))
        with self._database.read() as connection:
            count = connection.scalar(select(func.count()).select_from(one.join(other, both))) or 0
            query = select(one.c.id, other.c.id).select_from(one.join(other, both))
            keys = [tuple(row) for row in connection.execute(query.order_by(one.c.id.desc()).limit(limit))]
            wanted = [key for pair in keys for key in pair]
            homes = connection.scalars(select(_C.trajectory_id).where(_C.id.in_(wanted)).distinct()).all()
            calls = {call.id: call for its in load_calls(connection, sorted(homes)).values() for call in its}
        return count, tuple(Pair(calls[mine], calls[theirs]) for mine, theirs in keys)


def reward_of() -> ColumnElement[float | None]:
    """Return the reward that training uses, as an expression: `rewards.combine` in SQL. Keep both the same."""
    # A stored combination comes first. The combination `ruler` stores nothing; its reward is the judge's score.
    mine = select(_S.value).where(_S.trajectory_id == _T.id).order_by(_S.at.desc(), _S.id.desc()).limit(1)
    rules = (
        mine.where(_S.name == "reward", _S.source == "combined", _S.group_id == _T.group_id),
        mine.where(_S.name == "reward", _S.source.in_(("user", "code"))),
        mine.where(_S.name == "ruler", _S.source == "ruler", _S.group_id == _T.group_id),
    )
    return func.coalesce(*(rule.correlate(tables.trajectories).scalar_subquery() for rule in rules))


def matching(filter: Filter) -> Select[Any]:
    """Return the query for the ids of all trajectories that match the filter."""
    moment = func.coalesce(_T.last_call_at, _T.started_at)  # a trajectory without calls counts by its start
    return select(_T.id).where(*_conditions(filter), *_within(moment, filter))


def _conditions(filter: Filter) -> Iterable[ColumnElement[bool]]:
    # Equality on a column; the other conditions need a join or a choice.
    plain = {"user": _T.user_id, "session": _T.session_id, "name": _T.name, "origin": _T.origin}
    for field, column in plain.items():
        if getattr(filter, field) is not None:
            yield column == getattr(filter, field)
    if filter.origin is None and not filter.shadows:
        yield _T.origin.not_in(COPIES)
    if filter.scenario is not None:
        grouped = exists().where(_G.id == _T.group_id, _G.scenario_key == filter.scenario)
        yield or_(_T.scenario_key == filter.scenario, grouped)
    # Both keys, because a person knows the one that they gave to `group()`, and the store shows the other one.
    if filter.group is not None:
        yield or_(_T.group_id == filter.group, _T.group_key == filter.group)
    if filter.tag is not None:
        # LIKE ignores case on SQLite, and JSON functions differ between the databases. Replacing the quoted tag by
        # nothing changes the text only if the tag is there.
        text = cast(_T.tags, Text)
        yield func.replace(text, json.dumps(filter.tag), "") != text
    mine = _C.trajectory_id == _T.id
    if filter.policy is not None:
        policy = None if filter.policy == "upstream" else filter.policy
        yield exists().where(mine, _C.policy == policy if policy is not None else _C.policy.is_(None))
    if filter.model is not None:
        yield exists().where(mine, or_(_C.requested_model == filter.model, _C.answered_by == filter.model))
    if filter.error is not None:
        in_run, in_call = (column.icontains(filter.error, autoescape=True) for column in (_T.error, _C.error))
        yield or_(in_run, exists().where(mine, in_call))
    if filter.slower_than_s is not None:
        yield exists().where(mine, _C.duration_ms >= filter.slower_than_s * 1_000)
    if filter.status is not None:
        failed = or_(_T.error.is_not(None), exists().where(mine, _C.status != "ok"))
        yield failed if filter.status == "error" else ~failed
    if filter.trainable is not None:
        trainable = exists().where(mine, _C.untrainable.is_(None))
        yield trainable if filter.trainable else ~trainable
    if filter.untrainable is not None:
        yield exists().where(mine, _C.untrainable.icontains(filter.untrainable, autoescape=True))
    if filter.min_reward is not None:
        yield reward_of() >= filter.min_reward
    if filter.max_reward is not None:
        yield reward_of() <= filter.max_reward


def _within(moment: ColumnElement[Any], filter: Filter) -> Iterable[ColumnElement[bool]]:
    if filter.since is not None:
        yield moment >= filter.since
    if filter.until is not None:
        yield moment < filter.until


def _newest(policy: str | None) -> Subquery:
    """Return the newest answered call of a policy for each prompt: ids grow with time, so it has the largest id."""
    by: ColumnElement[Any] = _C.policy.is_(None) if policy is None else _C.policy == policy
    answered = select(_C.prompt, _C.tools, func.max(_C.id).label("id")).where(by, _C.status == "ok")
    return answered.group_by(_C.prompt, _C.tools).subquery()
