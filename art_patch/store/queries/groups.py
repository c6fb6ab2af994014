"""Lists groups for a person: pages by state, what a group taught, and which siblings a person may compare.

Groups are sorted by id, newest first: ids are uuid7, so their order is the order of time. A page is requested with the
last id of the page before it, so every page takes the same time to read.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, not_, select

from art_patch.store.backends.database import Part
from art_patch.store.queries.browse import GroupHead, reward_of
from art_patch.store.queries.learning import may_learn
from art_patch.store.queries.loading import openings_of, records_of, rows_in
from art_patch.store.queries.usage import SOURCES
from art_patch.store.schema import tables
from art_patch.store.schema.codec import RUN_KEY, expand, parse
from art_patch.trajectories import canonical, number_tool_calls
from art_patch.types import Score

_C, _G, _H, _R = tables.calls.c, tables.groups.c, tables.choices.c, tables.trained_rows.c
_S, _T, _W = tables.scores.c, tables.trajectories.c, tables.trainings.c


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Conditions on groups, all of which a group must meet. A field that is `None` is no condition."""

    state: str | None = None
    scenario: str | None = None
    held_out: bool | None = None
    policy: str | None = None  # a policy that was trained on the group


@dataclass(frozen=True, slots=True)
class GroupLine(GroupHead):
    """A group as one line of a list."""

    runs: int
    rewards: tuple[float, ...]  # of those of its runs that have one, lowest first
    trained: tuple[str, ...]  # names of the policies that were trained on it
    opening: str  # first words of the user, in one of its runs


@dataclass(frozen=True, slots=True)
class Taught:
    """What one run of a group taught a policy: the advantages of its answers, in the order of calls and choices."""

    policy: str
    trajectory_id: str
    advantages: tuple[float, ...]
    weights: tuple[float, ...]


class Groups(Part):
    """Queries for lists of groups and for what people review. They read only the data that a page shows."""

    def page(self, wanted: GroupFilter, *, before: str | None = None, limit: int = 50) -> tuple[GroupLine, ...]:
        """Return the newest groups with ids below `before`, newest first."""
        query, key = select(tables.groups), _G.id
        if wanted.policy is not None:
            query, key = (
                query.join(tables.trainings, _W.group_id == _G.id).where(_W.policy == wanted.policy),
                _W.group_id,
            )
            query = query.where(key < RUN_KEY)  # behind it are runs that no group taught
        for column, value in ((_G.state, wanted.state), (_G.scenario_key, wanted.scenario)):
            query = query if value is None else query.where(column == value)
        if wanted.held_out is not None:
            query = query.where(_G.held_out if wanted.held_out else not_(_G.held_out))
        if before is not None:
            query = query.where(key < before)
        rewards: dict[str, list[float | None]] = defaultdict(list)
        example: dict[str, str] = {}
        trained: dict[str, list[str]] = defaultdict(list)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(key.desc()).limit(limit)).all()
            ids = [row.id for row in rows]
            runs = select(_T.group_id, _T.id, reward_of())
            for group, run, reward in rows_in(connection, runs, _T.group_id, ids):
                rewards[group].append(reward)
                example[group] = min(run, example.get(group, run))
            openings = openings_of(connection, sorted(example.values()))
            for group, policy in rows_in(connection, select(_W.group_id, _W.policy), _W.group_id, ids):
                trained[group].append(policy)
        return tuple(
            GroupLine(
                row.id, row.scenario_key, row.how, bool(row.held_out), row.created_at, row.state, row.reason,
                len(rewards[row.id]), tuple(sorted(one for one in rewards[row.id] if one is not None)),
                tuple(sorted(trained[row.id])), openings.get(example.get(row.id, ""), ""),
            )
            for row in rows
        )  # fmt: skip

    def states(self) -> dict[str, int]:
        """Return the number of groups by state, from an index."""
        query = select(_G.state, func.count()).group_by(_G.state).order_by(_G.state)
        return {state: count for state, count in self._rows(query)}

    def scores(self, runs: Sequence[str]) -> Mapping[str, list[Score]]:
        """Return the scores of each of these runs, oldest first."""
        return self._read(records_of, tables.scores, Score, "at", runs)

    def taught(self, group: str, runs: Sequence[str]) -> tuple[Taught, ...]:
        """Return what these runs of a group taught, by policy and run."""
        query = (
            select(_R.policy, _R.trajectory_id, _R.advantage, _R.weight)
            .where(_R.group_id == group)
            .order_by(_R.policy, _R.trajectory_id, _R.call_id, _R.choice)
        )
        found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        with self._database.read() as connection:
            for policy, run, advantage, weight in rows_in(connection, query, _R.trajectory_id, runs):
                found[policy, run].append((advantage, weight))
        return tuple(
            Taught(policy, run, *(tuple(column) for column in zip(*rows, strict=True)))
            for (policy, run), rows in sorted(found.items())
        )

    # --- for people who review ---

    def to_review(self, *, before: str | None = None, limit: int = 100) -> dict[str, tuple[str, ...]]:
        """Return the newest groups with ids below `before` that may teach, newest first, with their runs.

        Held-out groups are left out, and so are runs that may not be learned from.
        """
        query = select(_G.id).where(not_(_G.held_out), _G.state.not_in(list(SOURCES)))
        if before is not None:
            query = query.where(_G.id < before)
        with self._database.read() as connection:
            ids = connection.scalars(query.order_by(_G.id.desc()).limit(limit)).all()
            return self._members(connection, ids)

    def members(self, groups: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Return the runs of each of these groups, without those that may not be learned from."""
        return self._read(self._members, groups)

    def _members(self, connection: Connection, groups: Sequence[str]) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {group: [] for group in groups}
        for group, run in rows_in(connection, select(_T.group_id, _T.id).where(may_learn()), _T.group_id, groups):
            found[group].append(run)
        return {group: tuple(sorted(runs)) for group, runs in found.items()}

    def second_passes(self, groups: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        """Return the facts of the newest judgement in the second pass, of those of these groups that have one."""
        j = tables.judgements.c
        query = select(j.group_id, j.facts).where(j.purpose == "second pass", j.state == "ok").order_by(j.at)
        with self._database.read() as connection:
            return {group: facts for group, facts in rows_in(connection, query, j.group_id, groups)}

    def ends(self, runs: Sequence[str]) -> dict[str, Hashable]:
        """Return a value of each run that has an answer; runs that say the same have the same value.

        It is made of the last answer and of the numbers of calls and tokens. Ids of tool calls are not part of it.
        """
        its, nodes = tables.calls.alias().c, tables.nodes.c
        last = select(func.max(its.started_at)).where(its.trajectory_id == _C.trajectory_id).scalar_subquery()
        answers = (
            select(_C.trajectory_id, _H.answer)
            .join(tables.choices, _H.call_id == _C.id)
            .where(_C.started_at == last)
            .order_by(_C.id, _H.index.desc())
        )
        sums = func.count(), func.sum(_C.prompt_tokens), func.sum(_C.completion_tokens)
        numbers = select(_C.trajectory_id, *sums).group_by(_C.trajectory_id)
        with self._database.read() as connection:
            answer_of = {run: answer for run, answer in rows_in(connection, answers, _C.trajectory_id, runs)}
            wanted = sorted(set(answer_of.values()))
            bodies = {key: body for key, body in rows_in(connection, select(nodes.id, nodes.body), nodes.id, wanted)}
            sizes = {row[0]: tuple(map(int, row[1:])) for row in rows_in(connection, numbers, _C.trajectory_id, runs)}
        said = {key: canonical(*number_tool_calls([parse(expand(body))])) for key, body in bodies.items()}
        return {run: (said[answer], *sizes[run]) for run, answer in answer_of.items() if answer in said}

    def there(self, scores: Collection[str]) -> frozenset[str]:
        """Return those of these ids that are ids of scores."""
        with self._database.read() as connection:
            return frozenset(key for (key,) in rows_in(connection, select(_S.id), _S.id, sorted(scores)))
