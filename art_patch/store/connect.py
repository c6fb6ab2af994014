"""Opening the database: pragmas, the write lock, migrations, and files that vanish or break while it is open.

Every write transaction of every process runs under one `flock` beside the database file: SQLite's own busy back-off
starves writers for seconds, the kernel's lock queue does not, and it keeps two connections from resetting the WAL at
once (a corruption bug in SQLite before 3.51.3). Reads take no lock and must be short, or the WAL grows.

A write looks first whether the path still names the open file (`renew`), and again after its commit: a file that was
deleted or replaced is opened anew, and made anew if need be. After an error that may stick to a connection (I/O, read
only, corrupt) the next write gets new connections. A file that is corrupt for new connections too is set aside by the
app's recorder, which has nobody to ask; commands only say what is wrong with it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from art_patch.errors import StoreError, StoreTooNew
from art_patch.store.files import StoreFiles, never_close
from art_patch.store.forking import closes_for_forks, in_sqlite, late_import
from art_patch.store.tables import HEAD
from art_patch.store.urls import sqlite_path

Trouble = Callable[[str, Exception], None]
"""Told that the file had to be made anew: `store.gone` or `store.corrupt`, and an error that says more."""

_BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_STICKY = _BROKEN | {
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PROTOCOL,
}
_POOL_LOGGER = "art_patch"

# The pool logs what it meets while it throws a broken connection away; we raise that very error ourselves.
logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{_POOL_LOGGER}").setLevel(logging.CRITICAL + 1)


class Database:
    """One database file with its two ways to write.

    `write()` commits with `synchronous=NORMAL`: after a power cut the last calls may be missing, never torn.
    `write(durable=True)` commits with `FULL`, for what is few and costly: scores, promotions, audit.

    Attributes:
        path: the file.
        generation: grows whenever another file is opened than before; what was known of its rows is worth nothing.
        stale: the next write opens the file anew.
    """

    def __init__(self, url: str, *, create: bool = True, trouble: Trouble | None = None) -> None:
        """Open and migrate.

        Args:
            url: `sqlite:////absolute/path/store.db`.
            create: make the file if it does not exist.
            trouble: who is told that the file was made anew; with it, a corrupt file of ours is set aside.

        Raises:
            StoreError: if the file cannot be opened, is not a database, or does not exist and `create` is false.
            StoreTooNew: if a newer release wrote it.
        """
        self.path = sqlite_path(url)
        if not create and not self.path.exists():
            raise StoreError(f"there is no store at {self.path}; run your agent with art_patch.patch() first")
        self.generation = 0
        self.stale = False
        self._url = url
        self._trouble = trouble
        self._strikes = 0
        self._files = StoreFiles(self.path)
        self._connect()
        try:
            with self._files.locked(), in_sqlite():
                self._open()
        except BaseException:
            self.close()
            raise
        _alive.add(self)
        closes_for_forks(self)

    def close(self) -> None:
        """Close every connection."""
        self._disconnect()
        self._files.close()

    @contextmanager
    def read(self) -> Generator[Connection]:
        """A short read transaction."""
        with in_sqlite(), self.errors(), self._calls.begin() as connection:
            yield connection

    @contextmanager
    def write(self, *, durable: bool = False) -> Generator[Connection]:
        """A write transaction; commits at the end, rolls back on any error.

        Raises:
            StoreError: if the database refuses, or was replaced while it was written; nothing is in the store then,
                or all of it, but not in the file that the path names now.
        """
        with self._files.locked(), in_sqlite():
            self.renew()
            try:
                with self.errors():
                    engine = self._ledger if durable else self._calls
                    with engine.connect().execution_options(art_patch_write=True) as connection, connection.begin():
                        yield connection
            except StoreError as error:
                self._suspect(error)
                raise
            self._strikes = 0
            if not self._files.same:
                self.stale = True
                raise StoreError(f"store {self.path}: the file was replaced while it was written; try again")
            self._files.remember()  # the log is another file after a fork, or after somebody else was the last to close

    def renew(self) -> None:
        """Open the file anew if it was deleted or replaced, or if an error may stick to the connections.

        Raises:
            StoreError: if that fails; the next try begins where this one ended.
        """
        if self._files.same and not self.stale:
            return
        with self._files.locked(), in_sqlite():
            self.stale = True
            self._disconnect()
            if self._files.replaced:
                self._files.forget()
                self._strikes = 0
                self.generation += 1
                self._tell("store.gone", f"store {self.path} was deleted or replaced while it was open")
            self._connect()
            self._open(broken=self._strikes > 1)
            self.stale = False

    @contextmanager
    def errors(self) -> Generator[None]:
        """Turn the driver's errors into `StoreError` with the file's name."""
        try:
            yield
        except DBAPIError as error:
            raise StoreError(f"store {self.path}: {error.orig}; {_advice(error.orig)}") from error

    def begin_in_child(self) -> None:
        """Take new connections and a new lock after a fork."""
        self._files.begin_in_child()
        never_close((self._calls, self._ledger))
        self._connect()

    def let_go(self) -> None:
        """Close the connections for a moment, because the process forks."""
        if not self._files.replaced:
            self._calls.dispose()
            self._ledger.dispose()

    def leave(self) -> None:
        """Before the interpreter takes the connections down: see that it does not harm another file."""
        if self._files.replaced:
            never_close((self._calls, self._ledger))

    def _connect(self) -> None:
        self._calls = _engine(self._url, "NORMAL")
        self._ledger = _engine(self._url, "FULL")

    def _disconnect(self) -> None:
        if self._files.replaced:
            self.leave()
        else:
            self._calls.dispose()
            self._ledger.dispose()

    def _open(self, broken: bool = False) -> None:
        self._files.clear_leftovers()
        if broken and self._may_set_aside:
            self._begin_another()
        try:
            with self.errors():
                self._migrate()
        except StoreError as error:
            if _code(error) not in _BROKEN or not self._may_set_aside:
                raise
            self._begin_another()
            with self.errors():
                self._migrate()
        os.chmod(self.path, 0o600)
        self._files.remember()

    def _begin_another(self) -> None:
        self._disconnect()
        aside = self._files.set_aside()
        self._connect()
        self.generation += 1
        self._strikes = 0
        self._tell("store.corrupt", f"store {self.path} was corrupt; it is kept as {aside}, and a new one was begun")

    @property
    def _may_set_aside(self) -> bool:
        return self._trouble is not None and self._files.may_be_set_aside

    def _tell(self, place: str, what: str) -> None:
        if self._trouble is not None:
            self._trouble(place, StoreError(what))

    def _suspect(self, error: StoreError) -> None:
        code = _code(error)
        self.stale = self.stale or code in _STICKY
        # One strike may be a connection that got confused. The second one came over a new connection.
        self._strikes += code in _BROKEN

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
        with late_import():  # alembic costs the app memory and time: only when needed
            for name in ("command", "config", "script"):
                import_module(f"alembic.{name}")
            from art_patch.store.migrations import upgrade

        if not upgrade(self._calls, revision):
            raise StoreTooNew(
                f"store {self.path} was written by a newer release (revision {revision}); "
                "upgrade art-patch here, or name another file with ART_PATCH_STORE"
            )


def _engine(url: str, synchronous: str) -> Engine:
    engine = create_engine(
        url, connect_args={"timeout": 10.0, "check_same_thread": False}, pool_logging_name=_POOL_LOGGER
    )

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


def _code(error: StoreError) -> int:
    """SQLite's primary result code behind an error of ours; 0 if there is none."""
    cause = error.__cause__
    code = getattr(cause.orig, "sqlite_errorcode", 0) if isinstance(cause, DBAPIError) else 0
    return code & 0xFF if isinstance(code, int) else 0


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


_alive: weakref.WeakSet[Database] = weakref.WeakSet()


def _after_fork() -> None:
    for database in list(_alive):
        database.begin_in_child()


def _at_exit() -> None:
    for database in list(_alive):
        database.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
