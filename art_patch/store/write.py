"""Writes the recorder's records: one transaction per batch, with shared content kept once.

The writer remembers which messages and trajectories it wrote, so that it does not write them again. It forgets them
when the rows may be gone: the file was deleted or replaced, the server restarted, or an erasure deleted shared content.
Then it writes a message again when a call needs it, and a trajectory's row when a late call belongs to it.

What is older than an erasure of its user, session or trajectory is not written. A process holds its calls for a moment,
and for as long as the store is down, in its memory and in its spool; no erasure reaches them there. So each erasure
leaves an entry in the audit log, and the writer drops the records of that user, session or trajectory that are older
than the entry. The check is inside the writer's transaction: a record is written before the entry, and then the erasure
deletes it, or after the entry, and then it is dropped.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sqlalchemy import Connection, delete, select

from art_patch.errors import StoreError
from art_patch.store.backends.database import Database
from art_patch.store.backends.files import checkpoint_if_large
from art_patch.store.rows import Batch, Statements
from art_patch.store.schema import tables
from art_patch.store.upstream_models import UpstreamModels
from art_patch.types import Call, Record, SpanInfo, TrajectoryInfo

_SEEN = 50_000  # messages and blocks of ids: about 5 MiB. A miss only costs an INSERT that does nothing.
_SEEN_TRAJECTORIES = 10_000
_TRIES = 3  # for a corrupt page: the first write finds it, the second uses new connections, the third a new file
_APP_KEPT_S = 7 * 86_400.0  # then the last report of a silent process is deleted
_WATCH_EVERY_S = 10.0

# Row of `control` whose value changes with each transaction that deletes shared content.
COLLECTED = "collected"

_NOT_ASKED = "not asked yet"

_HOW_COLLECTED = select(tables.control.c.value).where(tables.control.c.key == COLLECTED)
_ERASURES = select(tables.audit.c.detail, tables.audit.c.at).where(tables.audit.c.action == "erase")
_LAST_ERASURE = _ERASURES.with_only_columns(tables.audit.c.at).order_by(tables.audit.c.id.desc()).limit(1)


class Writer:
    """Writes batches of records. It is not thread-safe: a process has one writer thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._generation = database.generation
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._announced: OrderedDict[str, TrajectoryInfo] = OrderedDict()
        self._lost: dict[str, TrajectoryInfo] = {}
        self._forgot = False
        self._collected: str | None = _NOT_ASKED
        self._last_erasure = 0.0
        self._watch_at = 0.0
        self._statements: Statements | None = None
        self._models = UpstreamModels(database)

    def write(self, records: Sequence[Record], *, restores: bool = False) -> None:
        """Write the records in one transaction, so that either all of them are stored or none.

        Records that are older than an erasure of whom they belong to are left out, unless it `restores` them on
        purpose, as an import does.

        A batch with scores or corrections survives a power cut. A batch of calls only may be lost by a power cut
        shortly after the commit (`synchronous=NORMAL` in SQLite).

        Raises:
            StoreError: if the database reports an error. The batch may be written again; no record is stored twice.
        """
        # A batch can be tried again: each of its statements leaves one copy, however often it runs.
        for tried in range(1, _TRIES + 1):
            try:
                return self._write(records, restores)
            except StoreError as error:
                is_another = self._generation != self._database.generation
                if tried == _TRIES or not (is_another or self._database.should_retry(error)):
                    raise

    def _write(self, records: Sequence[Record], restores: bool) -> None:
        self._database.renew()
        if self._generation != self._database.generation:
            self._generation = self._database.generation
            self._statements = None  # in another file, the project may have another id
            self._forget()
        whole, batch = self._batch(records)
        with self._database.write(durable=batch.durable) as connection:
            # `write` itself may have found another file. The batch was made for the old one, so it is made again.
            if self._generation != self._database.generation:
                raise StoreError("the store was replaced just now; try again")
            # Inside the transaction: an erasure that commits before it may have deleted messages that we skip.
            collected = connection.scalar(_HOW_COLLECTED)
            if collected != self._collected:
                if self._collected != _NOT_ASKED:
                    self._forget()
                    whole, batch = self._batch(records)
                self._collected, self._last_erasure = collected, connection.scalar(_LAST_ERASURE) or 0.0
            if not restores and any(_made_at(record) < self._last_erasure for record in records):
                whole, batch = self._batch(self._without_erased(connection, records))
            self._insert(connection, batch)
            # A file tells what its models meant elsewhere, or long ago.
            models = {} if restores else self._models.note(connection, whole)
        # Only after the commit: what was rolled back must be written next time.
        self._models.known.update(models)
        self._seen.update(batch.new)
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        for record in whole:
            if isinstance(record, TrajectoryInfo):
                self._announced[record.id] = _merged(record, self._announced.get(record.id))
        while len(self._announced) > _SEEN_TRAJECTORIES:
            self._announced.popitem(last=False)

        self._watch_log()

    def _forget(self) -> None:
        """Forget what was written, because it may not be in the store any more."""
        self._seen.clear()
        self._models.forget()
        self._lost, self._announced = {**self._lost, **self._announced}, OrderedDict()
        self._forgot = True

    def _batch(self, records: Sequence[Record]) -> tuple[Sequence[Record], Batch]:
        whole = (*records, *self._missing(records)) if self._forgot else records
        return whole, Batch(whole, self._seen.__contains__, self._announced.get)

    def _without_erased(self, connection: Connection, records: Sequence[Record]) -> Sequence[Record]:
        """Return the records without those that an erasure after them concerns.

        A trajectory that was written since the erasure goes on, and so does one with a newer record here. So its
        description stays, although it began before the erasure.
        """
        since = min(map(_made_at, records))
        newer = _ERASURES.where(tables.audit.c.at > since).order_by(tables.audit.c.id)
        erased = {(its["what"], its["sha256"]): at for its, at in connection.execute(newer)}
        about = {record.id: record for record in records if isinstance(record, TrajectoryInfo)}

        def stays(record: Record) -> bool:
            key = _trajectory(record)
            info = key and (about.get(key) or self._announced.get(key) or self._lost.get(key))
            whose = [("trajectory", key), *((("user", info.user_id), ("session", info.session_id)) if info else ())]
            times = (erased.get((what, subject_of(what, value)["sha256"]), 0.0) for what, value in whose if value)
            return _made_at(record) >= max(times, default=0.0)

        kept = list(map(stays, records))
        goes_on = {_trajectory(record) for record, is_kept in zip(records, kept, strict=True) if is_kept}
        left = [
            record
            for record, is_kept in zip(records, kept, strict=True)
            if is_kept
            or (isinstance(record, TrajectoryInfo) and (record.id in goes_on or record.id in self._announced))
        ]
        # A later call of such a trajectory announces it again.
        gone = about.keys() - {record.id for record in left if isinstance(record, TrajectoryInfo)}
        self._lost |= {key: about[key] for key in gone}
        self._forgot |= bool(gone)
        return left

    def _watch_log(self) -> None:
        now = time.monotonic()
        if now >= self._watch_at:  # not more often: while a reader holds the log open, each try is in vain
            self._watch_at = now + _WATCH_EVERY_S
            with suppress(StoreError):  # the batch is committed, so a failure here must not look like a lost batch
                checkpoint_if_large(self._database.url)

    def _insert(self, connection: Connection, batch: Batch) -> None:
        if self._statements is None:
            self._statements = Statements(connection)
        batch.insert(connection, self._statements)
        if batch.latest_report is not None:
            silent = batch.latest_report - _APP_KEPT_S
            connection.execute(delete(tables.apps).where(tables.apps.c.at < silent))

    def _missing(self, records: Sequence[Record]) -> Sequence[TrajectoryInfo]:
        """Return the trajectories of the calls that may be gone from the store, so that they are announced again."""
        here = {record.id for record in records if isinstance(record, TrajectoryInfo)}
        found: dict[str, TrajectoryInfo] = {}
        for record in records:
            if not isinstance(record, Call):
                continue
            key = record.trajectory_id
            if not (key in here or key in found or key in self._announced):
                # The upsert never replaces a value by `None`, so this harms nothing if the trajectory is there.
                found[key] = self._lost.get(key, TrajectoryInfo(key, record.started_at))
        return tuple(found.values())


def _merged(info: TrajectoryInfo, before: TrajectoryInfo | None) -> TrajectoryInfo:
    """Return what is known of a trajectory now. A later record may lack the session or the user, as in the table."""
    if before is None:
        return info
    session_id = before.session_id if info.session_id is None else info.session_id
    user_id = before.user_id if info.user_id is None else info.user_id
    return replace(info, session_id=session_id, user_id=user_id, learn=info.learn and before.learn)


def subject_of(what: str, value: str) -> dict[str, str]:
    """Name a user, session or trajectory in the audit log, which outlives the data: by a hash."""
    return {"what": what, "sha256": hashlib.sha256(value.encode()).hexdigest()}


def _made_at(record: Record) -> float:
    """Return when the data of a record is from; infinity if it does not say so in a number."""
    at = record.started_at if isinstance(record, Call | TrajectoryInfo | SpanInfo) else record.at
    # A file of the spool may hold anything.
    return float(at) if isinstance(at, int | float) else math.inf  # pyright: ignore[reportUnnecessaryIsInstance]


def _trajectory(record: Record) -> str | None:
    return record.id if isinstance(record, TrajectoryInfo) else getattr(record, "trajectory_id", None)
