"""Opening the database: pragmas, the write lock, migrations.

Every write transaction of every process runs under one `flock` beside the database file: SQLite's own busy back-off
starves writers for seconds, the kernel's lock queue does not, and it keeps two connections from resetting the WAL at
once (a corruption bug in SQLite before 3.51.3). Reads take no lock and must be short, or the WAL grows.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from art_patch.errors import StoreError, StoreTooNew
from art_patch.store.tables import HEAD
from art_patch.store.urls import sqlite_path


class Database:
    """One database file with its two ways to write.

    `write()` commits with `synchronous=NORMAL`: after a power cut the last calls may be missing, never torn.
    `write(durable=True)` commits with `FULL`, for what is few and costly: scores, promotions, audit.
    """

    def __init__(self, url: str, *, create: bool = True) -> None:
        """Open and migrate.

        Raises:
            StoreError: if the file cannot be opened, is not a database, or does not exist and `create` is false.
            StoreTooNew: if a newer release wrote it.
        """
        self.path = sqlite_path(url)
        if not create and not self.path.exists():
            raise StoreError(f"there is no store at {self.path}; run your agent with art_patch.patch() first")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot write the store {self.path}: {error.strerror}; check the directory's owner and mode"
            ) from None
        self._calls = _engine(url, "NORMAL")
        self._ledger = _engine(url, "FULL")
        with self.errors(), self._locked():
            self._migrate()
            os.chmod(self.path, 0o600)

    def close(self) -> None:
        """Close every connection."""
        self._calls.dispose()
        self._ledger.dispose()
        os.close(self._lock)

    @contextmanager
    def read(self) -> Generator[Connection]:
        """A short read transaction."""
        with self.errors(), self._calls.begin() as connection:
            yield connection

    @contextmanager
    def write(self, *, durable: bool = False) -> Generator[Connection]:
        """A write transaction; commits at the end, rolls back on any error."""
        engine = self._ledger if durable else self._calls
        with self.errors(), self._locked(), engine.connect().execution_options(art_patch_write=True) as connection:
            with connection.begin():
                yield connection

    @contextmanager
    def errors(self) -> Generator[None]:
        """Turn the driver's errors into `StoreError` with the file's name."""
        try:
            yield
        except DBAPIError as error:
            raise StoreError(f"store {self.path}: {error.orig}; {_advice(error.orig)}") from error

    @contextmanager
    def _locked(self) -> Generator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _migrate(self) -> None:
        with self._calls.connect() as connection:
            tables = {row[0] for row in connection.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))}
            revision = None
            if "alembic_version" in tables:
                revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            elif tables:
                raise StoreError(f"{self.path} is a database, but not a store of art_patch; name another file")
        if revision == HEAD:
            return
        from art_patch.store.migrations import upgrade  # alembic costs the app memory and time: only when needed

        if not upgrade(self._calls, revision):
            raise StoreTooNew(
                f"store {self.path} was written by a newer release (revision {revision}); "
                "upgrade art-patch here, or name another file with ART_PATCH_STORE"
            )


def _engine(url: str, synchronous: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": 10.0, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction] - an event handler
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction] - an event handler
        # A deferred BEGIN that reads and then writes fails at once under contention; IMMEDIATE waits its turn.
        write = connection.get_execution_options().get("art_patch_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _advice(error: BaseException | None) -> str:
    words = str(error)
    if "readonly" in words or "unable to open" in words:
        return "check that the file and its directory can be written by this user"
    if "full" in words:
        return "free some disk space"
    if "not a database" in words or "malformed" in words:
        return "move the file away and start a new one, or restore a backup"
    if "locked" in words:
        return "another process holds it; try again"
    return "see the message above"
