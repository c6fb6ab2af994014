"""Where somebody's data is: their trajectories, copies of their calls, exports, and policies that learned from it.

Reads only. What was deleted cannot be asked any more, so an erasure notes exports and policies in the audit log when it
begins; one that was cut short is found there, and the next one reports them too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, func, select

from art_patch._lib.ids import MOST_REPLAYS, replay_id
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables
from art_patch.store.schema.lineage import run_key

_WAITING = ("formed", "scored")

_T, _C = tables.trajectories, tables.calls


@dataclass(frozen=True, slots=True)
class HeldBy:
    """An export that holds some of the data: a file that we wrote once and that may have been copied since."""

    id: str
    path: str
    format: str
    at: float
    who: str


@dataclass(frozen=True, slots=True)
class Taught:
    """A policy that learned from the data.

    Attributes:
        name: `NAME@STEP`.
        state: where it stands.
        how: `trained` on it, or `descends` from one that was.
        serves: whether it answers calls now.
        path: its adapter, if it has one.
    """

    name: str
    state: str
    how: str
    serves: bool
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Erasure:
    """What was erased, or with `dry_run` would be.

    Attributes:
        trajectories: runs of the agent.
        calls: theirs.
        messages: those that nothing else refers to; `None` in a dry run, because only deleting tells.
        scores: of these trajectories.
        spans: theirs.
        corrections: of their answers.
        judgements: of groups of which nothing is left.
        groups: those that held one of the trajectories.
        dead_groups: those of them that waited for training and have fewer than two members left.
        in_training: those of them that a cycle has claimed now: its candidate will hold the data.
        exports: that hold the data.
        policies: trained on it, and their descendants, oldest first.
        finishes: an earlier erasure of the same data was cut short, and this one ends it.
        scrubbed: nothing of it is left in the database's log; `False`: somebody was reading, run it again.
        dry_run: nothing was deleted.
    """

    trajectories: int = 0
    calls: int = 0
    messages: int | None = 0
    scores: int = 0
    spans: int = 0
    corrections: int = 0
    judgements: int = 0
    groups: tuple[str, ...] = ()
    dead_groups: tuple[str, ...] = ()
    in_training: tuple[str, ...] = ()
    exports: tuple[HeldBy, ...] = ()
    policies: tuple[Taught, ...] = ()
    finishes: bool = False
    scrubbed: bool = True
    dry_run: bool = False

    @property
    def found(self) -> bool:
        """Whether there was anything to erase, or to finish."""
        return bool(self.trajectories or self.calls or self.finishes)


def with_shadows(connection: Connection, ids: list[str]) -> list[str]:
    """Return the ids with those of their re-runs and of the trajectories that copy any of their calls, copies first."""
    ids = list(dict.fromkeys([*_replays(connection, ids), *ids]))
    copies: dict[str, None] = {}
    for some in some_of(ids):
        first = connection.scalar(select(func.min(_C.c.started_at)).where(_C.c.trajectory_id.in_(some)))
        if first is None:
            continue
        originals = select(_C.c.id).where(_C.c.trajectory_id.in_(some))
        # A copy starts after its original; without that bound every call ever made would be read.
        query = select(_C.c.trajectory_id).where(_C.c.started_at >= first, _C.c.shadow_of.in_(originals)).distinct()
        copies |= dict.fromkeys(connection.scalars(query))
    return list(dict.fromkeys([*copies, *ids]))


def _replays(connection: Connection, ids: list[str]) -> list[str]:
    """Return the trajectories that the job made by running these again."""
    found: list[str] = []
    for some in some_of(ids):
        # Few runs can be repeated at all; the others cost no look-ups.
        query = select(_T.c.id).where(_T.c.id.in_(some), cast(_T.c.metadata, Text).contains('"replay"'))
        again = [replay_id(key, number) for key in connection.scalars(query) for number in range(1, MOST_REPLAYS + 1)]
        for part in some_of(again):
            found += connection.scalars(select(_T.c.id).where(_T.c.id.in_(part)))
    return found


def strays(connection: Connection, trajectories: Collection[str]) -> list[str]:
    """Return those that rows still name: apps write on while their trajectories are erased."""
    found: set[str] = set()
    for some in some_of(list(trajectories)):
        for table in (
            _C,
            tables.spans,
            tables.scores,
            tables.corrections,
            tables.export_members,
            tables.sent,
            tables.trained_rows,
        ):
            found.update(connection.scalars(select(table.c.trajectory_id).where(table.c.trajectory_id.in_(some))))
    return sorted(found)


def count_rows(connection: Connection, these: Callable[[Any], ColumnElement[bool]]) -> dict[str, int]:
    """Return how many calls, scores, spans and corrections have a trajectory id of `these`."""
    counted = (
        ("calls", _C),
        ("scores", tables.scores),
        ("spans", tables.spans),
        ("corrections", tables.corrections),
    )
    return {
        name: connection.scalar(select(func.count()).select_from(table).where(these(table.c.trajectory_id))) or 0
        for name, table in counted
    }


def plan_of(connection: Connection, ids: Sequence[str], noted: dict[str, Any] | None, now: float) -> Erasure:
    """What an erasure of these trajectories will delete, and where copies live on."""
    found: Counter[str] = Counter()
    goes, groups = set(ids), set[str]()
    exports: set[str] = set((noted or {}).get("exports", ()))
    trained: set[str] = set((noted or {}).get("policies", ()))
    g, members, trainings = tables.groups, tables.export_members, tables.trainings
    for some in some_of(ids):
        found.update(count_rows(connection, lambda column, some=some: column.in_(some)))
        alone = list(map(run_key, some))
        trained.update(connection.scalars(select(trainings.c.policy).where(trainings.c.group_id.in_(alone))))
        groups.update(connection.scalars(select(_T.c.group_id).where(_T.c.id.in_(some), _T.c.group_id.is_not(None))))
        exports.update(connection.scalars(select(members.c.export_id).where(members.c.trajectory_id.in_(some))))
    dead: set[str] = set()
    claimed: set[str] = set()
    judgements, judged = tables.judgements.c.group_id, 0
    for some in some_of(sorted(groups)):
        trained.update(connection.scalars(select(trainings.c.policy).where(trainings.c.group_id.in_(some))))
        left: Counter[str] = Counter()
        for group, member in connection.execute(select(_T.c.group_id, _T.c.id).where(_T.c.group_id.in_(some))):
            left[group] += member not in goes
        empty = [group for group in some if not left[group]]
        judged += (
            connection.scalar(select(func.count()).select_from(tables.judgements).where(judgements.in_(empty))) or 0
        )
        for row in connection.execute(select(g).where(g.c.id.in_(some))):
            if row.policy is not None:
                trained.add(row.policy)
            if row.claimed_until is not None and row.claimed_until > now:
                claimed.add(row.id)
            if left[row.id] < 2 and row.state in _WAITING:
                dead.add(row.id)
    return Erasure(
        trajectories=len(ids),
        calls=found["calls"],
        scores=found["scores"],
        spans=found["spans"],
        corrections=found["corrections"],
        judgements=judged,
        messages=None if ids else 0,
        groups=tuple(sorted(groups)),
        dead_groups=tuple(sorted(dead)),
        in_training=tuple(sorted(claimed)),
        exports=tuple(_exports(connection, exports)),
        policies=tuple(_taught(connection, trained)),
        finishes=noted is not None,
        dry_run=True,
    )


def _exports(connection: Connection, ids: Collection[str]) -> Iterator[HeldBy]:
    table = tables.exports
    for row in connection.execute(select(table).where(table.c.id.in_(ids)).order_by(table.c.at)):
        yield HeldBy(row.id, row.path, row.format, row.at, row.who)


def _taught(connection: Connection, trained: Collection[str]) -> Iterator[Taught]:
    """The policies that were trained on the data, and all that were trained from them."""
    table, known = tables.policies, set(trained)
    for row in connection.execute(select(table).order_by(table.c.created_at)):  # parents come before children
        if row.name in known or row.parent in known:
            known.add(row.name)
            how = "trained" if row.name in trained else "descends"
            yield Taught(row.name, row.state, how, row.state == "champion", row.path)


def cut_short(connection: Connection, subject: dict[str, str]) -> dict[str, Any] | None:
    """What an erasure of the same data noted when it began, if it never noted its end."""
    table = tables.audit
    query = select(table.c.action, table.c.detail).where(table.c.action.in_(("erase", "erased")))
    for action, detail in connection.execute(query.order_by(table.c.id.desc())):
        if detail["sha256"] == subject["sha256"] and detail["what"] == subject["what"]:
            return detail if action == "erase" else None
    return None
