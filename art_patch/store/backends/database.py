"""The interface of a store's database, and making or migrating its tables. `sqlite.py` and `postgres.py` implement it.

`read()` is one consistent snapshot. `write()` is one transaction: all of it is committed, or nothing. Both raise
`StoreError` if the database reports an error. A writer that remembers which rows it wrote calls `renew()` before it
prepares the next write. If `generation` has grown since then, those rows may be gone from the database, and the writer
must write them again.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from art_patch._lib.forking import closes_for_forks, got_on, late_import
from art_patch.errors import StoreError, StoreTooNew, WrongProject
from art_patch.store.backends.urls import is_unknown, without_password
from art_patch.store.ledger.route import QUERY
from art_patch.store.schema import FIRST, tables

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
    from sqlalchemy.dialects.sqlite import Insert as SqliteInsert

P = ParamSpec("P")
R = TypeVar("R")

# Called when a new store had to be made: with `store.gone` or `store.corrupt`, and an error that explains it.
Trouble = Callable[[str, Exception], None]

POOL_LOGGER = "art_patch"

# The pool logs the error when it discards a broken connection. We raise the same error, so the app's log has it once.
logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{POOL_LOGGER}").setLevel(logging.CRITICAL + 1)


class Database(ABC):
    """An open database.

    Attributes:
        url: the URL as given. It may hold a password, so it is never shown.
        name: the URL without its password, for messages.
        project: the name of the project whose rows are read and written; `None` is the only project of the store;
            if it has several, only what concerns the whole store (`Maintenance`) can be done.
        scope: its `project_id`, which limits every statement (`scoping.py`), and the `agent_id` of the rows that are
            written. A write transaction hands both to its inserts.
        generation: grows when committed rows may be gone, because the SQLite file was replaced by another one or the
            connection to the PostgreSQL server was lost.
        stale: whether the open connections are unusable, so that the next write opens new ones.
    """

    def __init__(
        self, url: str, *, create: bool = True, project: str | None = None, trouble: Trouble | None = None
    ) -> None:
        # Subclasses connect. Arguments and errors are those of `open_store`.
        self.url = url
        self.project = project
        self._binds = create
        self._trouble = trouble
        self.name = without_password(url)
        self.generation = 0
        self.stale = False
        self.scope = {"project_id": FIRST, "agent_id": FIRST}

    @abstractmethod
    def close(self) -> None:
        """Close every connection to the database."""

    @abstractmethod
    def read(self) -> AbstractContextManager[sa.Connection]:
        """Return a short read transaction that sees the store as it was when the transaction began."""

    @abstractmethod
    def write(self, *, durable: bool = False, exclusive: bool = False) -> AbstractContextManager[sa.Connection]:
        """Return a write transaction that commits when its block ends, and rolls back on any error.

        Args:
            durable: the commit survives a power cut. Without `durable`, a power cut may lose the most recent commits,
                each of them completely.
            exclusive: no other write transaction runs at the same time. Deleting rows needs this, because it must see
                every row that still refers to a deleted one.
        """

    @abstractmethod
    def renew(self) -> None:
        """Open new connections if the old ones are `stale`; after a `StoreError` the next call or write tries again."""

    @abstractmethod
    def should_retry(self, error: StoreError) -> bool:
        """Return whether a transaction that failed with `error` may succeed if the caller repeats it at once."""

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Turn the driver's errors in the block into `StoreError`, whose message names the store and the remedy."""

    @abstractmethod
    def insert(self, table: sa.Table) -> SqliteInsert | PostgresInsert:
        """Return this dialect's INSERT, which has `on_conflict_do_nothing` and `on_conflict_do_update`.

        The caller sorts the rows by key: two transactions that insert the same rows in different orders deadlock.
        """

    def check(self, connection: sa.Connection) -> list[str]:
        """Return one message for each problem in the file. A PostgreSQL server checks its own pages."""
        return []

    @abstractmethod
    def begin_in_child(self) -> None:
        """Give the child process of a fork its own connections, because it must not use those of its parent."""

    @abstractmethod
    def let_go(self) -> None:
        """Close the connections before the process forks; the next read or write opens them again."""

    @abstractmethod
    def leave(self) -> None:
        """Prepare for the interpreter's exit, which closes the connections, so that no other file is damaged."""

    def _tell(self, place: str, what: str) -> None:
        if self._trouble is not None:
            self._trouble(place, StoreError(what))

    def control(self) -> Mapping[str, str]:
        """Return the project's rows that `store.ledger.route` builds the route from, as key and value."""
        with self.read() as connection:
            rows = connection.exec_driver_sql(QUERY.format(project=self.scope["project_id"]))
            return {key: value for key, value in rows}

    def _is_current(self, revision: str | None) -> bool:
        """Whether the store needs no migration. Apps, and servers that run, also use one that was only added to."""
        later = revision is not None and revision > tables.HEAD and revision[:2] == tables.HEAD[:2]
        return revision == tables.HEAD or (later and (self._trouble is not None or self in _alive))

    def _check_project(self, connection: sa.Connection) -> None:
        """Raise `StoreError` if the id is another project's by now, because others made the store anew."""
        if "project_id" not in self.scope:
            return
        found = connection.exec_driver_sql(f"SELECT name FROM projects WHERE id = {self.scope['project_id']}").first()
        if found is None or (None not in (self.project, found[0]) and self.project != found[0]):
            self.stale = True
            self.generation += 1
            error = StoreError(f"store {self.name} was made anew by another process; try again")
            error.may_pass = True
            raise error

    def _bind(self, connection: sa.Connection) -> None:
        """Find the project in the store; with `create`, add it if it is new. Else an unknown one is `WrongProject`."""
        id, name = tables.projects.c
        if self.project is None:
            ids = connection.scalars(sa.select(id).limit(2)).all()
            # Without an id, a statement about one project raises a KeyError.
            self.scope = {"agent_id": FIRST} | ({"project_id": ids[0]} if len(ids) == 1 else {})
            return
        ours, nobodys = sa.select(id).where(name == self.project), sa.select(id).where(name.is_(None))
        found = connection.scalar(ours)
        if found is None and self._binds:
            decide_alone(connection)  # two machines may do this at once; the second one finds the first one's row
            found = connection.scalar(ours) or self._add_project(connection)
        # A project without a name is whoever's comes: somebody made the store without one, and nothing can be mixed up.
        found = found or connection.scalar(nobodys)
        if found is None:
            names = connection.scalars(sa.select(name).order_by(id).limit(20))
            raise WrongProject(is_unknown(self.url, self.project, list(names)))
        self.scope = {"project_id": found, "agent_id": FIRST}

    def _add_project(self, connection: sa.Connection) -> int:
        id, name = tables.projects.c
        named = sa.update(tables.projects).where(name.is_(None)).values(name=self.project).returning(id)
        found = connection.scalar(named)
        if found is None:
            found = (connection.scalar(sa.select(sa.func.max(id))) or 0) + 1
            connection.execute(tables.projects.insert().values(id=found, name=self.project))
            connection.execute(tables.agents.insert().values(id=FIRST, project_id=found))
        return found

    def _opened(self) -> None:
        _alive.add(self)
        closes_for_forks(self)


class Part:
    """A part of an open store: the operations of one kind on its database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # Each of these is a read transaction of its own.

    def _read(self, ask: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        with self._database.read() as connection:
            return ask(connection, *args, **kwargs)

    def _scalar(self, query: sa.Executable) -> Any:
        return self._read(lambda connection: connection.scalar(query))

    def _column(self, query: sa.Executable) -> Sequence[Any]:
        return self._read(lambda connection: connection.scalars(query).all())

    def _rows(self, query: sa.Executable) -> Sequence[Any]:
        return self._read(lambda connection: connection.execute(query).all())


def revision_of(connection: sa.Connection, found: set[str], name: str) -> str | None:
    """Return a store's schema revision, `None` without tables; `StoreError` if the tables `found` are no store's."""
    # `alembic_version` alone proves nothing: other programs use alembic, and may have a revision "0001" too.
    if {"alembic_version", "nodes"} <= found:
        if not {"projects", "audit_id"} <= found:
            raise StoreError(
                f"{name} was made by a version of art_patch before its first release, which no release can read; "
                "move it away, or name another store with --store (ART_PATCH_STORE)"
            )
        return connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    if found:
        raise StoreError(f"{name} is a database, but not a store of art_patch; name another one")
    return None


def upgrade(connection: sa.Connection, revision: str | None, name: str, schema: str | None = None) -> None:
    """Make the tables if `revision` is `None`, else migrate them, or raise `StoreTooNew`. No other writer may run."""
    if revision is None:
        _make_tables(connection)
        return
    with late_import():  # only when needed: importing alembic costs the app memory and time
        for part in ("command", "config", "script"):
            import_module(f"alembic.{part}")
        from art_patch.store.schema.migrations import upgrade as migrate

    if not migrate(connection, revision, schema):
        raise StoreTooNew(
            f"store {name} was written by a newer release (revision {revision}, this one knows {tables.HEAD}); "
            "upgrade art-patch here, or name another store with ART_PATCH_STORE"
        )


# The version table as alembic makes it. A store that was made without alembic must be migratable by it.
_version = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def _make_tables(connection: sa.Connection) -> None:
    # Running all migrations takes ten times as long, and a short program ends before alembic is even imported.
    for table in (*tables.metadata.sorted_tables, _version):
        # `checkfirst` would find a table of the same name in a later schema of PostgreSQL's search path and skip ours.
        table.create(connection, checkfirst=False)
        got_on()
    connection.execute(_version.insert().values(version_num=tables.HEAD))
    connection.execute(tables.projects.insert().values(id=FIRST))
    connection.execute(tables.agents.insert().values(id=FIRST, project_id=FIRST))


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


# Advisory locks of PostgreSQL, which end with their transaction. SQLite has one writer at a time and needs none. Each
# lock has two numbers, as `pg_locks` shows them: `classid` is one of these, `objid` the oid of the schema, so stores in
# two schemas of one database do not wait for each other. A transaction that needs both takes the writers' lock first.
# Every write transaction holds it shared. The garbage collector and migrations hold it alone.
WRITERS = 0x41525401

# Held alone by a transaction that decides: else the audit chain could fork, or two champions could serve.
DECISIONS = 0x41525402

_SCHEMA = "quote_ident(current_schema())::regnamespace::oid::int"
WRITE_SHARED = f"SELECT pg_advisory_xact_lock_shared({WRITERS}, {_SCHEMA})"
WRITE_ALONE = f"SELECT pg_advisory_xact_lock({WRITERS}, {_SCHEMA})"
_DECIDE = f"SELECT pg_advisory_xact_lock({DECISIONS}, {_SCHEMA})"


def decide_alone(connection: sa.Connection) -> None:
    """Lock all decisions (changes of policies, route and audit log) until the end of this transaction.

    On SQLite it does nothing, because every write transaction is exclusive there. Call it before the transaction
    changes its first row; otherwise two transactions may deadlock. A second call in the same transaction has no effect.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_DECIDE)
