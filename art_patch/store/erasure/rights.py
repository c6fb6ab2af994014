"""Erasing somebody's data, and retention: trajectories with all that hangs on them, while apps go on writing.

In: a user, a session or a trajectory; or an age and a number to keep. Out: what was deleted, and where copies of it
live on: exports, and policies that were trained on it.

Rules. `deletion.py` deletes in chunks, between which the lock is free; after each of them the store is sound, and
running it again finishes what was cut short. Calls that arrive meanwhile are deleted too: it ends when nothing is found
any more. Copies of the app's calls that the champion was asked in the background go first, because they are found by
the calls they copy. The audit log keeps that something was erased and a hash of whose, never whose.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, and_, func, or_, select

from art_patch.errors import ConfigError
from art_patch.store.backends.database import Database
from art_patch.store.erasure.deletion import Deletion, Progress
from art_patch.store.erasure.whereabouts import Erasure, count_rows, cut_short, plan_of, strays, with_shadows
from art_patch.store.ledger.audit import note
from art_patch.store.schema import tables
from art_patch.store.upkeep.maintain import scrub
from art_patch.types import COPIES

_LISTED = 5_000  # ids held at once by retention
_T = tables.trajectories


@dataclass(frozen=True, slots=True)
class Pruned:
    """What retention deleted, or with `dry_run` would."""

    trajectories: int = 0
    calls: int = 0
    messages: int | None = 0
    scores: int = 0
    spans: int = 0
    dead_groups: int = 0
    dry_run: bool = False


class Rights:
    """Deleting what was recorded."""

    def __init__(self, database: Database) -> None:
        """Delete through `database`."""
        self._database = database

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
        """Delete everything of a user, a session or a trajectory.

        Args:
            user: `user_id` of the trajectories.
            session: their `session_id`.
            trajectory: the id of one.
            who: for the audit log.
            dry_run: only say what would be deleted and where copies live on.
            progress: told how it goes on.
            now: seconds since the epoch.

        Raises:
            ConfigError: unless exactly one of the three is given.
            StoreError: if the database refuses; what was deleted is deleted, run it again to go on.
        """
        given = {"user": user, "session": session, "trajectory": trajectory}
        chosen = [(what, value) for what, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise ConfigError("say whose data to erase: exactly one of user, session and trajectory")
        ((what, value),) = chosen
        at = time.time() if now is None else now
        match = {"user": _T.c.user_id, "session": _T.c.session_id, "trajectory": _T.c.id}[what] == value
        subject = {"what": what, "sha256": hashlib.sha256(value.encode()).hexdigest()}
        with self._database.read() as connection:
            ids = with_shadows(connection, list(connection.scalars(select(_T.c.id).where(match))))
            if trajectory is not None and trajectory not in ids and strays(connection, [trajectory]):
                ids.append(trajectory)
            plan = plan_of(connection, ids, cut_short(connection, subject), at)
        if dry_run or not plan.found:
            return plan
        facts = {
            "exports": [one.id for one in plan.exports],
            "policies": [one.name for one in plan.policies if one.how == "trained"],
        }
        with self._database.write(durable=True) as connection:
            note(connection, who, "erase", subject | facts | {"trajectories": len(ids)}, at)
        deletion = Deletion(self._database, "the data of its siblings was erased", progress, len(ids))
        everything, held, taught = set(ids), plan.exports, plan.policies
        while ids:
            deletion.delete(ids)
            with self._database.read() as connection:  # apps, exports and cycles may have gone on meanwhile
                ids = with_shadows(connection, list(connection.scalars(select(_T.c.id).where(match))))
                ids += [one for one in strays(connection, everything) if one not in ids]
                late = plan_of(connection, ids, None, at)
            everything.update(ids)
            held, taught = (*held, *late.exports), (*taught, *late.policies)
        deletion.finish()
        clean = scrub(self._database)
        with self._database.write(durable=True) as connection:
            note(connection, who, "erased", subject | deletion.metrics() | {"groups": len(deletion.groups)}, at)
        gone = deletion.metrics()
        return Erasure(
            trajectories=gone["trajectories"],
            calls=gone["calls"],
            messages=gone["messages"],
            scores=gone["scores"],
            spans=gone["spans"],
            corrections=gone["corrections"],
            judgements=gone["judgements"],
            groups=tuple(sorted(deletion.groups)),
            dead_groups=tuple(sorted(deletion.dead)),
            in_training=plan.in_training,
            exports=tuple(dict.fromkeys(held)),
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
        """Delete trajectories whose last call is too long ago, and all but the newest.

        Trajectories whose group waits for training are no exception: how long data is kept is a promise.

        Args:
            older_than_s: delete those whose last call, else whose start, is longer ago than this.
            keep: how many of the newest stay, copies not counted; those go with what they copy.
            who: for the audit log.
            dry_run: only count.
            progress: told how it goes on.
            now: seconds since the epoch.

        Raises:
            ConfigError: if neither an age nor a number is given, or one of them is negative.
            StoreError: if the database refuses; what was deleted is deleted, run it again to go on.
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
                return Pruned(
                    trajectories=total,
                    calls=found["calls"],
                    messages=None if total else 0,
                    scores=found["scores"],
                    spans=found["spans"],
                    dry_run=dry_run,
                )
        reason = "its siblings are older than what is kept"
        deletion = Deletion(self._database, reason, progress, total)
        while True:
            with self._database.read() as connection:
                ids = list(connection.scalars(select(_T.c.id).where(old).limit(_LISTED)))
                copies = [key for key in with_shadows(connection, ids) if key not in set(ids)]
            if not ids:
                break
            deletion.delete(copies)  # made later than what they copy, they would outlive it
            deletion.delete(ids, only=old)
        deletion.finish()
        scrub(self._database)
        kept = {"older_than_s": older_than_s, "keep": keep}
        with self._database.write(durable=True) as connection:
            note(connection, who, "prune", kept | deletion.metrics() | {"dead_groups": len(deletion.dead)}, at)
        gone = deletion.metrics()
        return Pruned(
            trajectories=gone["trajectories"],
            calls=gone["calls"],
            messages=gone["messages"],
            scores=gone["scores"],
            spans=gone["spans"],
            dead_groups=len(deletion.dead),
        )


def _too_old(connection: Connection, before: float | None, keep: int | None) -> ColumnElement[bool]:
    last = func.coalesce(_T.c.last_call_at, _T.c.started_at)
    conditions: list[ColumnElement[bool]] = [] if before is None else [last < before]
    if keep is not None:
        newest = select(last, _T.c.id).where(_T.c.origin.not_in(COPIES)).order_by(last.desc(), _T.c.id.desc())
        first_to_go = connection.execute(newest.offset(keep).limit(1)).one_or_none()
        if first_to_go is not None:
            at, key = first_to_go
            conditions.append(or_(last < at, and_(last == at, _T.c.id <= key)))
    return or_(*conditions) if conditions else _T.c.id.is_(None)
