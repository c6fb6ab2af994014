"""Writes the recorder's records: one transaction per batch, with shared content kept once.

The writer remembers which messages and trajectories it wrote, so that it does not write them again. It forgets them
when the rows may be gone: the file was deleted or replaced, the server restarted, or an erasure deleted shared content.
Then it writes a message again when a call needs it, and a trajectory's row when a late call belongs to it. What is
older than an erasure of its user, session or trajectory is not written (`erasure/late.py`).
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sqlalchemy import Connection, delete, select

from art_patch.errors import StoreError
from art_patch.store.backends.database import Database
from art_patch.store.backends.files import checkpoint_if_large
from art_patch.store.erasure.late import last_erasure, made_at, without_erased
from art_patch.store.rows import Batch, Statements
from art_patch.store.schema import tables
from art_patch.types import Call, Record, TrajectoryInfo

_SEEN = 50_000  # messages and blocks of ids: about 5 MiB. A miss only costs an INSERT that does nothing.
_SEEN_TRAJECTORIES = 10_000
_TRIES = 3  # for a corrupt page: the first write finds it, the second uses new connections, the third a new file
_APP_KEPT_S = 7 * 86_400.0  # then the last report of a silent process is deleted
_WATCH_EVERY_S = 10.0

# Row of `control` whose value changes with each transaction that deletes shared content.
COLLECTED = "collected"

_NOT_ASKED = "not asked yet"

_HOW_COLLECTED = select(tables.control.c.value).where(tables.control.c.key == COLLECTED)


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
                self._collected, self._last_erasure = collected, last_erasure(connection)
            if not restores and any(made_at(record) < self._last_erasure for record in records):
                whole, batch = self._batch(self._without_erased(connection, records))
            self._insert(connection, batch)
        # Only after the commit: what was rolled back must be written next time.
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
        self._lost, self._announced = {**self._lost, **self._announced}, OrderedDict()
        self._forgot = True

    def _batch(self, records: Sequence[Record]) -> tuple[Sequence[Record], Batch]:
        whole = (*records, *self._missing(records)) if self._forgot else records
        return whole, Batch(whole, self._seen.__contains__, self._announced.get)

    def _without_erased(self, connection: Connection, records: Sequence[Record]) -> Sequence[Record]:
        announced, lost = self._announced, self._lost
        left = without_erased(connection, records, lambda key: announced.get(key) or lost.get(key), announced)
        # A later call of such a trajectory announces it again.
        here = {record.id for record in left if isinstance(record, TrajectoryInfo)}
        gone = {record.id: record for record in records if isinstance(record, TrajectoryInfo) and record.id not in here}
        self._lost |= gone
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
    return replace(info, session_id=session_id, user_id=before.user_id if info.user_id is None else info.user_id)
