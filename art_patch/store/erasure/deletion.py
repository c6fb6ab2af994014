"""Deletes trajectories in short transactions: their calls, content that only these used, and groups that become empty.

In: ids of trajectories. Out: the number of deleted rows, and the groups that lost a member. Calls are deleted together
with the content that only they referred to. A trajectory is deleted when it has no calls left, and its group is updated
in the same transaction. So the store is consistent after each transaction, and a deletion whose process was killed is
completed by running it again.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, exists, func, select, update

from art_patch.store import search_index
from art_patch.store.backends.database import Database
from art_patch.store.erasure import collect
from art_patch.store.erasure.collect import Pending
from art_patch.store.ledger.decisions import control_of, set_control
from art_patch.store.queries.read import DELETED, spent
from art_patch.store.schema import tables
from art_patch.types import COPIES, ENGINE_FULL

# Called with the number of deleted trajectories, and with the number to delete in all.
Progress = Callable[[int, int], None]

# A transaction takes steps until its time is over. These bound one step, so that it takes a few milliseconds.
_CALLS = 100
_ROWS = 500  # spans, scores, corrections or answers of gates
_TRAJECTORIES = 50
_MANY_BLOBS = 500  # then tools are collected in between, so that the row `collecting` stays small

# States of a group that waits for training.
WAITING = ("formed", "scored")

# All tables that name a trajectory. A new one must be added here; where its rows may be many, to the first ones.
_MANY = (tables.spans, tables.scores, tables.corrections, tables.gate_answers)
_NOTES = (tables.export_members, tables.sent, tables.trained_rows)
NAMING = (tables.calls, *_MANY, *_NOTES)

_T, _C, _CHOICES = tables.trajectories, tables.calls, tables.choices

# Built once: in a transaction of a few milliseconds, building a statement takes as long as running it.
_SOME_TRAJECTORIES = bindparam("trajectories", expanding=True)
_THESE_CALLS = bindparam("calls", expanding=True)
_SOME_CALLS = (
    select(_C.c.id, _C.c.prompt, _C.c.prompt_block, _C.c.tools)
    .add_columns(_C.c.policy, _C.c.fallback, _C.c.status, _C.c.untrainable, _C.c.shadow_of)
    .where(_C.c.trajectory_id.in_(_SOME_TRAJECTORIES))
    .limit(_CALLS)
)
_ANSWERS = select(_CHOICES.c.answer).where(_CHOICES.c.call_id.in_(_THESE_CALLS))
_DELETE_CHOICES = delete(_CHOICES).where(_CHOICES.c.call_id.in_(_THESE_CALLS))
_DELETE_CALLS = delete(_C).where(_C.c.id.in_(_THESE_CALLS))
_DELETE_NOTES = [delete(table).where(table.c.trajectory_id.in_(_SOME_TRAJECTORIES)) for table in _NOTES]
_GROUPS_OF = select(_T.c.group_id).where(_T.c.id.in_(_SOME_TRAJECTORIES), _T.c.group_id.is_not(None))
_ORIGINS = select(_T.c.origin).where(_T.c.id.in_(_SOME_TRAJECTORIES))
_DELETE_TRAJECTORIES = delete(_T).where(_T.c.id.in_(_SOME_TRAJECTORIES))
_DELETE_SOME = {
    table.name: delete(table).where(
        table.c.id.in_(select(table.c.id).where(table.c.trajectory_id.in_(_SOME_TRAJECTORIES)).limit(_ROWS))
    )
    for table in _MANY
}


class Deletion:
    """A deletion of trajectories in progress, with the number of rows that it has deleted so far."""

    def __init__(self, database: Database, reason: str, progress: Progress | None, total: int) -> None:
        """Begin with nothing deleted. Groups that die get `reason`; `total` is only for the progress."""
        self._database = database
        self._reason = reason
        self._progress = progress
        self._total = total
        self._counts: Counter[str] = Counter()
        # What this transaction takes away from the numbers of `Reader.counts`.
        self._taken: Counter[str] = Counter()
        self.groups: set[str] = set()  # ids of the groups that lost a member
        self.dead: set[str] = set()  # of those, the ones that waited for training and have fewer than two members left

    def metrics(self) -> dict[str, Any]:
        """Return the number of rows deleted so far by kind, such as `calls` and `scores`."""
        names = ("trajectories", "calls", "messages", "scores", "spans", "corrections", "gate_answers", "judgements")
        return {name: self._counts[name] for name in names}

    def delete(self, ids: Sequence[str], only: ColumnElement[bool] | None = None) -> None:
        """Delete these trajectories; with `only`, skip those that no longer meet it when their transaction begins."""
        left = list(ids)
        while left:
            began = time.perf_counter()
            with collect.alone(self._database) as connection:
                many_blobs = self._chunk(connection, left, only)
            if self._progress is not None:
                done = self._counts["trajectories"]
                self._progress(done, max(done, self._total))
            collect.breathe(began)
            if many_blobs:
                collect.collect_blobs(self._database)

    def finish(self) -> None:
        """Delete the shared content that the last transactions may have orphaned and did not check yet, and words."""
        self._counts["messages"] += collect.collect(self._database)["nodes"]
        search_index.merge(self._database)

    def _chunk(self, connection: Connection, left: list[str], only: ColumnElement[bool] | None) -> bool:
        """Delete until the time is over, at least one step; remove the deleted ids from `left`."""
        until = time.perf_counter() + collect.BUDGET_S
        pending = Pending.load(connection)
        self._counts["messages"] += collect.climb(connection, pending, until)["nodes"]
        touched = False
        while left and not pending.chains and (not touched or time.perf_counter() < until):
            some = left[:_TRAJECTORIES]
            still = some
            if only is not None:
                still = list(connection.scalars(select(_T.c.id).where(_T.c.id.in_(some), only)))
            if self._step(connection, still, pending):
                del left[: len(some)]
            touched = True
            self._counts["messages"] += collect.climb(connection, pending, until)["nodes"]
        if touched:
            collect.note_collected(connection)
            _keep_count(connection, self._taken)
            self._taken.clear()
        pending.save(connection)
        return len(pending.ids["blobs"]) >= _MANY_BLOBS

    def _step(self, connection: Connection, ids: Sequence[str], pending: Pending) -> bool:
        """Delete a bounded number of rows of these trajectories; return whether they are deleted completely."""
        calls = connection.execute(_SOME_CALLS, {"trajectories": ids}).all()
        if calls:
            keys = {"calls": [call.id for call in calls]}
            search_index.forget(connection, keys["calls"])  # while their messages are there
            pending.add("nodes", connection.scalars(_ANSWERS, keys))
            pending.add("nodes", (call.prompt for call in calls))
            pending.add("token_blocks", (call.prompt_block for call in calls))
            pending.add("blobs", (call.tools for call in calls))
            connection.execute(_DELETE_CHOICES, keys)
            connection.execute(_DELETE_CALLS, keys)
            self._counts["calls"] += len(calls)
            self._taken.update(name for call in calls for name in _names_of(call))
        if len(calls) == _CALLS:
            return False
        for name, statement in _DELETE_SOME.items():
            gone = connection.execute(statement, {"trajectories": ids}).rowcount
            self._counts[name] += gone
            self._taken["scores"] += gone if name == "scores" else 0
            if gone == _ROWS:
                return False
        for statement in _DELETE_NOTES:
            connection.execute(statement, {"trajectories": ids})
        groups = set(connection.scalars(_GROUPS_OF, {"trajectories": ids}))
        for origin in connection.scalars(_ORIGINS, {"trajectories": ids}):
            self._taken[f"calls_{origin}" if origin in COPIES else "trajectories"] += 1
        self._counts["trajectories"] += connection.execute(_DELETE_TRAJECTORIES, {"trajectories": ids}).rowcount
        self.groups |= groups
        self.dead |= _settle(connection, groups, self._reason, self._counts, self._taken)
        return True


def _names_of(call: Any) -> Iterator[str]:
    """Yield the names under which `Reader.counts` counts a call; copies are counted by their trajectories."""
    if call.shadow_of is None:
        yield "calls"
        numbers = {
            "calls_by_policy": call.policy is not None,
            "calls_fell_back": call.fallback is not None,
            "calls_engine_full": (call.fallback or "").endswith(ENGINE_FULL),
            "calls_not_ok": call.status != "ok",
            "calls_trainable": call.untrainable is None,
        }
        yield from (name for name, counts in numbers.items() if counts)


def _keep_count(connection: Connection, taken: Mapping[str, float]) -> None:
    """Add what was deleted to the project's count, so that numbers of all time do not fall by a deletion."""
    kept: Counter[str] = Counter(json.loads(control_of(connection, DELETED) or "{}"))
    kept.update(taken)  # pyright: ignore[reportArgumentType] - US dollars are no whole numbers
    if +kept:
        set_control(connection, DELETED, json.dumps(dict(sorted((+kept).items()))))


def _settle(
    connection: Connection, groups: Collection[str], reason: str, counts: Counter[str], taken: Counter[str]
) -> set[str]:
    """Delete groups without members; mark groups with one member that wait for training as `dead`; return these."""
    # `trainings` keeps which policies learned from a deleted group: it names no person.
    if not groups:
        return set()
    g = tables.groups
    members = select(func.count()).where(_T.c.group_id == g.c.id).scalar_subquery()
    rows = connection.execute(select(g.c.id, g.c.scenario_key, g.c.state, members).where(g.c.id.in_(groups))).all()
    empty = [key for key, _, _, count in rows if count == 0]
    dead = [key for key, _, state, count in rows if count == 1 and state in WAITING]
    if dead:
        values = {"state": "dead", "reason": reason}
        connection.execute(update(g).where(g.c.id.in_(dead)).values(values))
    if empty:
        connection.execute(delete(g).where(g.c.id.in_(empty)))
        judgements = tables.judgements  # its findings may quote the members
        taken.update({f"judge_{name}": value for name, value in spent(connection, empty).items()})
        counts["judgements"] += connection.execute(delete(judgements).where(judgements.c.group_id.in_(empty))).rowcount
        scenarios = tables.scenarios  # a key may hold a user's words, so it goes with its last group
        unused = ~exists().where(g.c.scenario_key == scenarios.c.key)
        keys = {scenario for key, scenario, _, _ in rows if key in empty}
        connection.execute(delete(scenarios).where(scenarios.c.key.in_(keys), unused))
    return {key for key, _, state, count in rows if count < 2 and state in WAITING}
