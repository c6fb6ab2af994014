"""A store in a SQLite file: its settings, the write lock, and files that are deleted or damaged while they are open.

Every write transaction of every process holds one `flock` on a lock file beside the database file. Reads take no lock
and must be short, because the write-ahead log grows while a read transaction is open.

A write checks before it begins, and again after its commit, that the path still names the open file. If the file was
deleted or replaced, the file at the path is opened, and made if it is missing. After an error that may be due to the
connection (I/O, read only, corrupt) the next write opens new connections. If the file is corrupt for new connections
too, the app's recorder renames it and begins a new file, because no operator is there to decide. Commands never rename
a file: they only report that it is corrupt.
"""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, Table, create_engine, event, text
from sqlalchemy.dialects.sqlite import Insert
from sqlalchemy.exc import DBAPIError

from art_patch._lib.forking import in_database
from art_patch.errors import NotFound, StoreError
from art_patch.store.backends.database import POOL_LOGGER, Database, Trouble, revision_of, upgrade
from art_patch.store.backends.files import StoreFiles, bytes_of, never_close
from art_patch.store.backends.scoping import limit_to_project
from art_patch.store.backends.urls import sqlite_path
from art_patch.store.schema.codec import parse

# SQLite's own busy back-off starves writers for seconds; the kernel's lock queue does not. The lock also keeps two
# connections from resetting the WAL at the same time, which corrupts it in SQLite before 3.51.3.

_BROKEN = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Errors that a connection may return for ever, although the file is fine again.
_STICKY = _BROKEN | {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PROTOCOL}


class SqliteDatabase(Database):
    """A store in a SQLite file. `write()` commits with `synchronous=NORMAL`, `write(durable=True)` with `FULL`."""

    def __init__(
        self, url: str, *, create: bool = True, project: str | None = None, trouble: Trouble | None = None
    ) -> None:
        super().__init__(url, create=create, project=project, trouble=trouble)
        self.path = sqlite_path(url)
        if not create and not bytes_of(self.path):  # an empty file was just made by a busy or dead process
            raise self._missing()
        self._strikes = 0
        self._files = StoreFiles(self.path)
        self._connect()
        try:
            with self._files.locked(), in_database():
                self._open(create=create)
        except BaseException:
            self.close()
            raise
        self._opened()

    def close(self) -> None:
        """Close every connection to the file, and the lock file."""
        self._disconnect()
        self._files.close()

    @contextmanager
    def read(self) -> Generator[Connection]:
        """Return a short read transaction that sees the store as it was when the transaction began."""
        if self.stale:
            self.renew()
        with in_database(), self.errors(), self._calls.begin() as connection:
            self._check_project(connection)
            yield connection

    @contextmanager
    def write(self, *, durable: bool = False, exclusive: bool = False) -> Generator[Connection]:
        """Return a write transaction. It is always exclusive, because SQLite allows one writer at a time.

        If the file is replaced meanwhile, it raises `StoreError`: the rows are missing from the file at the path.
        """
        with self._files.locked(), in_database():
            self.renew()
            try:
                with self.errors():
                    engine = self._ledger if durable else self._calls
                    with (
                        engine.connect().execution_options(art_patch_write=True, **self.scope) as connection,
                        connection.begin(),
                    ):
                        self._check_project(connection)
                        yield connection
            except StoreError as error:
                self._suspect(error)
                raise
            self._strikes = 0
            if not self._files.same:
                self.stale = True
                raise StoreError(f"store {self.path}: the file was replaced while it was written; try again")
            # The log is another file after a fork, or after another process closed the last connection.
            self._files.remember()

    def renew(self) -> None:
        """Open the file at the path again if it was deleted or replaced, or if an error broke the connections."""
        if self._files.same and not self.stale:
            return
        with self._files.locked(), in_database():
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

    def should_retry(self, error: StoreError) -> bool:
        """Return whether a repeated transaction may succeed, because it would use new connections or another file."""
        return self.stale

    def insert(self, table: Table) -> Insert:
        """Return an INSERT into `table` in SQLite's dialect, to which the caller adds values and `ON CONFLICT`."""
        return Insert(table)

    def check(self, connection: Connection) -> list[str]:
        """Run SQLite's `integrity_check`, and return one message for each problem that it finds."""
        lines = connection.execute(text("PRAGMA integrity_check")).scalars()
        return [f"sqlite: {line}" for line in lines if line != "ok"]

    @contextmanager
    def errors(self) -> Generator[None]:
        """Turn the driver's errors in the block into `StoreError`, whose message names the file and the remedy."""
        try:
            yield
        except DBAPIError as error:
            failed = StoreError(f"store {self.path}: {error.orig}; {_advice(error.orig)}")
            failed.__cause__ = error
            failed.may_pass = _code(failed) in _MAY_PASS
            raise failed from error

    def begin_in_child(self) -> None:
        """Open new connections and a new lock file in the child of a fork."""
        self._files.begin_in_child()
        never_close((self._calls, self._ledger))  # they are the parent's
        self._connect()

    def let_go(self) -> None:
        """Close the connections before the process forks; the next read or write opens them again."""
        if not self._files.replaced:
            self._calls.dispose()
            self._ledger.dispose()

    def leave(self) -> None:
        """Keep connections to a replaced file open: on closing, SQLite would delete the new database's `-wal`."""
        if self._files.replaced:
            never_close((self._calls, self._ledger))

    def _connect(self) -> None:
        self._calls = _engine(self.url, self.path, "NORMAL")
        self._ledger = _engine(self.url, self.path, "FULL")
        for engine in (self._calls, self._ledger):
            limit_to_project(engine.dialect, lambda: self.scope["project_id"])

    def _disconnect(self) -> None:
        if self._files.replaced:
            self.leave()
        else:
            self._calls.dispose()
            self._ledger.dispose()

    def _open(self, *, broken: bool = False, create: bool = True) -> None:
        self._files.clear_leftovers()
        self._files.make()
        if broken and self._may_set_aside:
            self._begin_another()
        try:
            with self.errors():
                self._migrate(create=create)
        except StoreError as error:
            if _code(error) not in _BROKEN or not self._may_set_aside:
                raise
            self._begin_another()
            with self.errors():
                self._migrate()
        self._files.keep_private()
        self._files.remember()

    def _begin_another(self) -> None:
        self._disconnect()
        self._files.keep_private()
        aside = self._files.set_aside()
        self._files.make()
        self._connect()
        self.generation += 1
        self._strikes = 0
        self._tell("store.corrupt", f"store {self.path} was corrupt; it is kept as {aside}, and a new one was begun")

    @property
    def _may_set_aside(self) -> bool:
        return self._trouble is not None and self._files.may_be_set_aside

    def _suspect(self, error: StoreError) -> None:
        code = _code(error)
        self.stale = self.stale or code in _STICKY
        # The first such error may come from a confused connection. The second one comes over a new connection, so the
        # file itself is broken.
        self._strikes += code in _BROKEN

    def _missing(self) -> StoreError:
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # no access, or a stale mount: it may well be there
            return StoreError(f"store {self.path}: {error.strerror}; see that this user can read it")
        return NotFound(f"there is no store at {self.path}; run your agent with art_patch.patch() first")

    def _migrate(self, *, create: bool = True) -> None:
        with self._calls.connect() as connection:
            found = set(connection.scalars(text("SELECT name FROM sqlite_master")))
            revision = revision_of(connection, found, f"store {self.path}")
        if revision is None and not create:
            raise self._missing()
        with self._calls.begin() as connection:
            if not self._is_current(revision):
                upgrade(connection, revision, str(self.path))
            if create and "sqlite_stat1" not in found:
                for statement in _STATISTICS:
                    connection.exec_driver_sql(statement)
            self._bind(connection)


def _engine(url: str, path: Path, synchronous: str) -> Engine:
    def connect() -> sqlite3.Connection:
        # `mode=rw` creates no file: SQLite would make one that other users can read. `StoreFiles.make` has made it.
        return sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=10.0, check_same_thread=False)

    engine = create_engine(
        url,
        creator=connect,
        json_deserializer=parse,  # a third of the time that the standard library's takes
        pool_logging_name=POOL_LOGGER,
    )

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction] - an event handler
        connection.isolation_level = None  # `on_begin` sends BEGIN; the driver must not send its own
        connection.execute("PRAGMA journal_mode=WAL")  # readers and the writer do not wait for each other
        # On every connection, not only those that erase: when a row grows or a page splits, SQLite leaves a copy of the
        # data in free space unless this is set. Erasing cannot find such copies later.
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction] - an event handler
        # A deferred BEGIN that reads and then writes fails at once if another writer came between. IMMEDIATE waits.
        write = connection.get_execution_options().get("art_patch_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


# What SQLite's planner believes of each index: its rows, then those that agree in the first column, in the first two
# and so on. Else it takes a condition on `project_id` for as good as one on an id, and finds a run by reading its whole
# project. The numbers are never measured: those of a young store would be wrong later. Partial indexes are preferred.
_STATISTICS = (
    "ANALYZE sqlite_master",  # makes the table
    """
    WITH indexes AS (SELECT tbl_name, name, CASE WHEN sql LIKE '% WHERE %' THEN 10000 ELSE 1000000 END AS many
                     FROM sqlite_master WHERE type = 'index')
    INSERT INTO sqlite_stat1 SELECT tbl_name, name, many || ' ' || (SELECT group_concat(
        CASE WHEN seqno = 0 AND its.name = 'project_id' THEN many / 10 ELSE 10 END, ' ')
    FROM pragma_index_info(indexes.name) AS its) FROM indexes
    """,
    "ANALYZE sqlite_master",  # makes this connection read it
)

# SQLITE_BUSY, LOCKED, NOMEM, READONLY, IOERR, FULL, CANTOPEN
_MAY_PASS = (5, 6, 7, 8, 10, 13, 14)


def _code(error: StoreError) -> int:
    """Return SQLite's primary result code behind an error of ours; 0 if there is none."""
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
