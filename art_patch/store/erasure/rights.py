"""Erases a person's data, and deletes old trajectories (retention), while apps go on writing to the store.

In: a user, a session or a trajectory; or an age and a number to keep. Out: the number of deleted rows, and the places
where copies remain: exports, and policies that were trained on the data.

Rules. `deletion.py` deletes in short transactions. After each one the store is sound, and a second run finishes what a
kill cut short. An erasure ends when a last query finds nothing, so calls that arrive meanwhile are deleted; what was
recorded before it and comes later is not written (`write.py`). The audit log records each erasure with a hash of the
user's id, never the id itself, and also one that found nothing. An erasure writes the exports and policies
that it found to the audit log when it begins, so a second run reports them although the rows are deleted by then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, false, func, or_, select

from art_patch._lib.ids import MOST_REPLAYS, replay_id
from art_patch.errors import ConfigError
from art_patch.store.backends.database import Part
from art_patch.store.erasure.collect import note_collected
from art_patch.store.erasure.deletion import NAMING, WAITING, Deletion, Progress
from art_patch.store.ledger.decisions import note
from art_patch.store.ledger.transfers import Export
from art_patch.store.maintain import scrub
from art_patch.store.queries.loading import rows_in, some_of
from art_patch.store.schema import tables
from art_patch.store.schema.codec import run_key
from art_patch.store.write import subject_of
from art_patch.types import COPIES, IMPORTED

_LISTED = 5_000  # ids held at once by retention

_T, _C = tables.trajectories, tables.calls


@dataclass(frozen=True, slots=True)
class Pruned:
    """Numbers of the rows that retention deleted, or in a dry run would delete; `messages` is then unknown (`None`)."""

    trajectories: int = 0
    calls: int = 0
    messages: int | None = 0
    scores: int = 0
    spans: int = 0
    dead_groups: int = 0
    dry_run: bool = False


class Rights(Part):
    """Erases a person's data, and deletes old trajectories."""

    def erase(
        self,
        *,
        user: str | None = None,
        session: str | None = None,
        trajectory: str | None = None,
        who: str = "art_patch",
        dry_run: bool = False,
        progress: Progress | None = None,
        now: float | None = None,
    ) -> Erasure:
        """Delete all trajectories of a user or a session, or one trajectory, and return what was deleted.

        Args:
            user: a `user_id`. Exactly one of `user`, `session` and `trajectory` is given.
            dry_run: delete nothing; return what would be deleted and where copies remain.

        Raises:
            ConfigError: if not exactly one of the three is given.
            StoreError: if the database reports an error. Rows that are deleted stay deleted; another run continues.
        """
        given = {"user": user, "session": session, "trajectory": trajectory}
        chosen = [(what, value) for what, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ConfigError("say whose data to erase: exactly one of user, session and trajectory")
        ((what, value),) = chosen
        at = time.time() if now is None else now
        match = {"user": _T.c.user_id, "session": _T.c.session_id, "trajectory": _T.c.id}[what] == value
        subject = subject_of(what, value)
        with self._database.read() as connection:
            ids = with_shadows(connection, list(connection.scalars(select(_T.c.id).where(match))))
            # A killed erasure may have deleted the trajectory, and an app may have written a call of it since.
            if trajectory is not None and trajectory not in ids and strays(connection, [trajectory]):
                ids.append(trajectory)
            plan = plan_of(connection, ids, cut_short(connection, subject))
        if dry_run:
            return plan
        facts = {
            "exports": [one.id for one in plan.exports],
            "policies": [one.name for one in plan.policies if one.how == "trained"],
        }
        # Before the first row goes: afterwards nobody could say which exports and policies hold the data. Also if there
        # is no row: an app may hold what it has not written yet, which its writer drops when it finds this entry.
        with self._database.write(durable=True) as connection:
            note(connection, who, "erase", subject | facts | {"trajectories": len(ids)}, at)
            note_collected(connection)
        deletion = Deletion(self._database, "the data of its siblings was erased", progress, len(ids))
        everything, held, taught = set(ids), plan.exports, plan.policies
        while ids:
            deletion.delete(ids)
            with self._database.read() as connection:  # apps, exports and cycles may have written meanwhile
                ids = with_shadows(connection, list(connection.scalars(select(_T.c.id).where(match))))
                ids += [one for one in strays(connection, everything) if one not in ids]
                late = plan_of(connection, ids, None)
            everything.update(ids)  # a late row may name a trajectory that was deleted in an earlier round
            held, taught = (*held, *late.exports), (*taught, *late.policies)
        deletion.finish()
        # SQLite's log holds old pages with the deleted text until it is emptied.
        clean = scrub(self._database)
        with self._database.write(durable=True) as connection:
            note(connection, who, "erased", subject | deletion.metrics() | {"groups": len(deletion.groups)}, at)
        return Erasure(
            **deletion.metrics(),
            groups=tuple(sorted(deletion.groups)),
            dead_groups=tuple(sorted(deletion.dead)),
            exports=tuple(dict.fromkeys(held)),  # each once, in the order in which they were found
            policies=tuple(dict.fromkeys(taught)),
            finishes=plan.finishes,
            scrubbed=clean,
        )

    def prune(
        self,
        *,
        older_than_s: float | None = None,
        keep: int | None = None,
        who: str = "art_patch",
        dry_run: bool = False,
        progress: Progress | None = None,
        now: float | None = None,
    ) -> Pruned:
        """Delete trajectories that are too old or too many, also those whose group waits for training.

        Args:
            older_than_s: delete trajectories whose last call (or start, without calls) is longer ago than this.
            keep: keep at most this many of the newest trajectories. Copies do not count: each one is deleted together
                with its original.
            dry_run: delete nothing; return the numbers of rows that would be deleted.

        Raises:
            ConfigError: if neither an age nor a number is given, or one of them is negative.
            StoreError: if the database reports an error. Rows that are deleted stay deleted; another run continues.
        """
        if older_than_s is None and keep is None:
            raise ConfigError("say what to keep: an age, a number of trajectories, or both")
        if min(older_than_s or 0, keep or 0) < 0:
            raise ConfigError("an age or a number of trajectories to keep cannot be negative; 0 deletes all")
        at = time.time() if now is None else now
        with self._database.read() as connection:
            old = _too_old(connection, None if older_than_s is None else at - older_than_s, keep)
            total = connection.scalar(select(func.count()).select_from(_T).where(old)) or 0
            if dry_run or not total:
                subquery = select(_T.c.id).where(old)
                found = count_rows(connection, lambda column: column.in_(subquery))
                shown = {name: found[name] for name in ("calls", "scores", "spans")}
                return Pruned(trajectories=total, messages=None if total else 0, dry_run=dry_run, **shown)
        reason = "its siblings are older than what is kept"
        deletion = Deletion(self._database, reason, progress, total)
        while True:  # in portions of ids, so that memory is bounded
            with self._database.read() as connection:
                ids = list(connection.scalars(select(_T.c.id).where(old).limit(_LISTED)))
                copies = [key for key in with_shadows(connection, ids) if key not in set(ids)]
            if not ids:
                break
            deletion.delete(copies)  # a copy is younger than its original, so its own age would let it stay
            deletion.delete(ids, only=old)  # a run that got a new call meanwhile is not old any more
        deletion.finish()
        scrub(self._database)
        kept = {"older_than_s": older_than_s, "keep": keep}
        with self._database.write(durable=True) as connection:
            note(connection, who, "prune", kept | deletion.metrics() | {"dead_groups": len(deletion.dead)}, at)
        gone = {name: deletion.metrics()[name] for name in ("trajectories", "calls", "messages", "scores", "spans")}
        return Pruned(**gone, dead_groups=len(deletion.dead))


def _too_old(connection: Connection, before: float | None, keep: int | None) -> ColumnElement[bool]:
    last = func.coalesce(_T.c.last_call_at, _T.c.started_at)  # a run without calls ages from its start
    conditions: list[ColumnElement[bool]] = [] if before is None else [last < before]
    if keep is not None:
        newest = select(last, _T.c.id).where(_T.c.origin.not_in(COPIES)).order_by(last.desc(), _T.c.id.desc())
        first_to_go = connection.execute(newest.offset(keep).limit(1)).one_or_none()
        if first_to_go is not None:
            at, key = first_to_go
            # By time and then by id, because runs of the same moment must be told apart.
            conditions.append(or_(last < at, and_(last == at, _T.c.id <= key)))
    return or_(*conditions) if conditions else false()  # there are at most `keep` runs


_PUBLISHED_WITHIN_S = 600.0  # after its manifest was written, a policy is in the ledger


@dataclass(frozen=True, slots=True)
class Taught:
    """A policy that was trained on the erased data, or descends from one. It is only reported here, never deleted."""

    name: str
    state: str
    how: str  # `trained` on the data, `descends` from a policy that was, or an imported `copy` of one of these
    serves: bool  # whether the policy is the champion now
    path: str | None = None  # directory of its adapter; `None` for a base model


@dataclass(frozen=True, slots=True)
class Erasure:
    """The number of rows that an erasure deleted, or with `dry_run` would delete, and where copies remain."""

    trajectories: int = 0
    calls: int = 0
    # Number of messages that no other row refers to; `None` in a dry run, which does not compute it.
    messages: int | None = 0
    scores: int = 0
    spans: int = 0
    corrections: int = 0
    gate_answers: int = 0  # turns of these trajectories whose answers a gate kept
    judgements: int = 0  # judgements of groups that became empty
    groups: tuple[str, ...] = ()  # ids of the groups that held one of the trajectories
    # Ids of those groups that waited for training and cannot be used with fewer than two members left.
    dead_groups: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()  # exports that hold the data. They are only reported here, never deleted
    policies: tuple[Taught, ...] = ()  # trained on the data, descendants and imported copies, oldest first
    finishes: bool = False  # whether this run completes an earlier erasure of the same data that was cut short
    # Whether the write-ahead log is free of the data. If not, an open reader prevented it: erase again.
    scrubbed: bool = True
    dry_run: bool = False  # whether nothing was deleted

    @property
    def found(self) -> bool:
        """Whether there was data to erase, or an earlier erasure to complete."""
        return bool(self.trajectories or self.calls or self.finishes)


def with_shadows(connection: Connection, ids: list[str]) -> list[str]:
    """Return the ids of all copies and repetitions of these trajectories, followed by the given `ids`."""
    # Copies come first: they are found by the calls that they copy, so they must be deleted before these.
    ids = list(dict.fromkeys([*_replays(connection, ids), *ids]))
    copies: dict[str, None] = {}
    for some in some_of(ids):
        # Not `min` in SQL: PostgreSQL would walk the index of times from the project's first call on.
        first = min(connection.scalars(select(_C.c.started_at).where(_C.c.trajectory_id.in_(some))), default=None)
        if first is None:
            continue
        originals = select(_C.c.id).where(_C.c.trajectory_id.in_(some))
        # `shadow_of` has no index. A copy starts after its original, so this bound saves reading all calls ever made.
        query = select(_C.c.trajectory_id).where(_C.c.started_at >= first, _C.c.shadow_of.in_(originals))
        copies |= dict.fromkeys(connection.scalars(query))
    return list(dict.fromkeys([*copies, *ids]))


def _replays(connection: Connection, ids: list[str]) -> list[str]:
    """Return the trajectories that the job made by repeating these."""
    # Ids of repetitions are derived from the original's, so they are looked up instead of searched for. Few runs offer
    # to be repeated; the others cost no look-up.
    offering = select(_T.c.id).where(cast(_T.c.metadata, Text).contains('"replay"'))
    originals = rows_in(connection, offering, _T.c.id, ids)
    again = [replay_id(key, number) for (key,) in originals for number in range(1, MOST_REPLAYS + 1)]
    return [key for (key,) in rows_in(connection, select(_T.c.id), _T.c.id, again)]


def strays(connection: Connection, trajectories: Collection[str]) -> list[str]:
    """Return those of the deleted trajectories that other rows refer to again, because an app wrote meanwhile."""
    found: set[str] = set()
    for table in NAMING:
        its = table.c.trajectory_id
        found.update(key for (key,) in rows_in(connection, select(its), its, list(trajectories)))
    return sorted(found)


def count_rows(connection: Connection, these: Callable[[Any], ColumnElement[bool]]) -> dict[str, int]:
    """Return the numbers of rows of each kind whose trajectory id meets the condition `these`."""
    return {
        table.name: connection.scalar(select(func.count()).select_from(table).where(these(table.c.trajectory_id))) or 0
        for table in (_C, tables.scores, tables.spans, tables.corrections, tables.gate_answers)
    }


def plan_of(connection: Connection, ids: Sequence[str], noted: dict[str, Any] | None) -> Erasure:
    """Return what an erasure of these trajectories will delete, and where copies remain. Nothing is deleted here."""
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
    ours, judgement = sorted(groups), tables.judgements.c
    trained.update(key for (key,) in rows_in(connection, select(trainings.c.policy), trainings.c.group_id, ours))
    left: Counter[str] = Counter()
    for group, member in rows_in(connection, select(_T.c.group_id, _T.c.id), _T.c.group_id, ours):
        left[group] += member not in goes
    empty = [group for group in ours if not left[group]]
    judged = len(list(rows_in(connection, select(judgement.id), judgement.group_id, empty)))
    for row in rows_in(connection, select(g), g.c.id, ours):
        if row.policy is not None:
            trained.add(row.policy)
        if left[row.id] < 2 and row.state in WAITING:
            dead.add(row.id)
    return Erasure(
        trajectories=len(ids),
        **dict[str, Any](found),
        judgements=judged,
        messages=None if ids else 0,
        groups=tuple(sorted(groups)),
        dead_groups=tuple(sorted(dead)),
        exports=tuple(_exports(connection, exports)),
        policies=tuple(_taught(connection, trained)),
        finishes=noted is not None,
        dry_run=True,
    )


def _exports(connection: Connection, ids: Collection[str]) -> Iterator[Export]:
    table = tables.exports
    query = select(*tables.columns_of(table, Export)).where(table.c.id.in_(ids)).order_by(table.c.at)
    return (Export(*row) for row in connection.execute(query))


def _taught(connection: Connection, trained: Collection[str]) -> Iterator[Taught]:
    """Return the policies that were trained on the data, all that descend from them, and imported copies of these."""
    table, known = tables.policies, dict[str, Any]()
    # Parents and originals are older than children and copies, so one pass finds all of them.
    for row in connection.execute(select(table).order_by(table.c.created_at)):
        if row.name in trained:
            how = "trained"
        elif row.parent in known:
            how = "descends"
        elif _is_copy(row, known):
            how = "copy"
        else:
            continue
        known[row.name] = row
        yield Taught(row.name, row.state, how, row.state == "champion", row.path)


def _is_copy(imported: Any, known: Mapping[str, Any]) -> bool:
    """Return whether an imported policy is a copy of one of the `known` ones, by what it brought along."""
    evidence = (imported.metrics.get(IMPORTED) or {}).get("evidence") or {}
    original = known.get(evidence.get("policy", ""))
    if original is None or original.base_sha256 != imported.base_sha256:
        return False
    # Another project may have a policy of this name. A trainer's manifest is older than the ledger's entry.
    made_at = evidence.get("made_at")
    return made_at is None or abs(made_at - original.created_at) < _PUBLISHED_WITHIN_S


def cut_short(connection: Connection, subject: dict[str, str]) -> dict[str, Any] | None:
    """Return the audit entry with which an earlier erasure of the same data began, if that erasure was cut short."""
    table = tables.audit
    query = select(table.c.action, table.c.detail).where(table.c.action.in_(("erase", "erased")))
    for action, detail in connection.execute(query.order_by(table.c.id.desc())):
        if detail["sha256"] == subject["sha256"] and detail["what"] == subject["what"]:
            return detail if action == "erase" else None
    return None
