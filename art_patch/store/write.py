"""Writing what the recorder saw: one transaction a batch, messages and prompt ids kept once.

The writer remembers what it wrote, so as not to write it again. When the file was deleted or replaced, that is what
the new one lacks: messages are written again as calls need them, and trajectories that were announced in the old one.
The same after somebody has erased something: messages that nothing referred to any more may be those we remember, and
a call that comes late may belong to a trajectory that is gone.

Rows are tuples and go to the driver as they are. SQLAlchemy says once how the statements are written for the database;
its own handling of each value of each row would cost as much as SQLite does.
"""

from __future__ import annotations

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
from art_patch.types import Call, Record, TrajectoryInfo

_SEEN = 50_000  # messages and blocks of ids: about 5 MiB; a miss only costs one INSERT OR IGNORE
_SEEN_TRAJECTORIES = 10_000
_TRIES = 3  # the write that meets a corrupt page, once more over a new connection, and into a new file

_APP_KEPT_S = 7 * 86_400.0
"""How long the last report of a process that is silent is kept."""

_WATCH_EVERY_S = 10.0

COLLECTED = "collected"
"""Row of `control` that changes with each transaction which collects what nothing refers to any more."""

_NOT_ASKED = "not asked yet"

_HOW_COLLECTED = select(tables.control.c.value).where(tables.control.c.key == COLLECTED)


class Writer:
    """Turns records into rows. Not thread-safe: one writer thread a process."""

    def __init__(self, database: Database) -> None:
        """Write through `database`."""
        self._database = database
        self._generation = database.generation
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._announced: OrderedDict[str, TrajectoryInfo] = OrderedDict()
        self._lost: dict[str, TrajectoryInfo] = {}
        self._forgot = False
        self._collected: str | None = _NOT_ASKED
        self._watch_at = 0.0
        self._statements: Statements | None = None

    def write(self, records: Sequence[Record]) -> None:
        """Write the batch in one transaction; all of it or nothing.

        Scores are committed durably, calls with `synchronous=NORMAL`.

        Raises:
            StoreError: if the database refuses; nothing of the batch was written.
        """
        for tried in range(1, _TRIES + 1):
            try:
                return self._write(records)
            except StoreError as error:
                is_another = self._generation != self._database.generation
                if tried == _TRIES or not (is_another or self._database.should_retry(error)):
                    raise

    def _write(self, records: Sequence[Record]) -> None:
        self._database.renew()
        if self._generation != self._database.generation:
            self._generation = self._database.generation
            self._forget()
        whole, batch = self._batch(records)
        with self._database.write(durable=batch.durable) as connection:
            if self._generation != self._database.generation:
                raise StoreError("the store was replaced just now; try again")
            collected = connection.scalar(_HOW_COLLECTED)
            if collected != self._collected:
                if self._collected != _NOT_ASKED:
                    self._forget()
                    whole, batch = self._batch(records)
                self._collected = collected
            self._insert(connection, batch)
        records = whole
        # Only what is committed may be skipped next time.
        self._seen.update(batch.new)
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        for record in records:
            if isinstance(record, TrajectoryInfo):
                self._announced[record.id] = _merged(record, self._announced.get(record.id))
        while len(self._announced) > _SEEN_TRAJECTORIES:
            self._announced.popitem(last=False)

        self._watch_log()

    def _forget(self) -> None:
        """What we wrote may not be there any more."""
        self._seen.clear()
        self._lost, self._announced = {**self._lost, **self._announced}, OrderedDict()
        self._forgot = True

    def _batch(self, records: Sequence[Record]) -> tuple[Sequence[Record], Batch]:
        whole = (*records, *self._missing(records)) if self._forgot else records
        return whole, Batch(whole, self._seen.__contains__, self._announced.get)

    def _watch_log(self) -> None:
        now = time.monotonic()
        if now >= self._watch_at:  # not more often: where a reader holds on to the log, nothing can be done
            self._watch_at = now + _WATCH_EVERY_S
            with suppress(StoreError):  # the batch is written; the next time will do
                checkpoint_if_large(self._database.url)

    def _insert(self, connection: Connection, batch: Batch) -> None:
        if self._statements is None:
            self._statements = Statements(connection)
        batch.insert(connection, self._statements)
        if batch.latest_report is not None:
            silent = batch.latest_report - _APP_KEPT_S
            connection.execute(delete(tables.apps).where(tables.apps.c.at < silent))

    def _missing(self, records: Sequence[Record]) -> Sequence[TrajectoryInfo]:
        """Trajectories that the calls belong to and that may have been in what is gone now."""
        here = {record.id for record in records if isinstance(record, TrajectoryInfo)}
        found: dict[str, TrajectoryInfo] = {}
        for record in records:
            if not isinstance(record, Call):
                continue
            key = record.trajectory_id
            if not (key in here or key in found or key in self._announced):
                nothing_known = TrajectoryInfo(key, record.started_at)
                found[key] = self._lost.get(key, nothing_known)
        return tuple(found.values())


def _merged(info: TrajectoryInfo, before: TrajectoryInfo | None) -> TrajectoryInfo:
    """Return what is known of a trajectory now. A later record may lack the session or the user, as in the table."""
    if before is None:
        return info
    return replace(info, session_id=info.session_id or before.session_id, user_id=info.user_id or before.user_id)
