"""What every database of a store can do; `sqlite.py` and `postgres.py` say how, `connect.py` opens one.

`read()` is one consistent look, `write()` one transaction, all or nothing. A writer that waits between two writes finds
out with `renew()` what happened meanwhile: `generation` has grown if rows that it wrote may be gone.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, select, text, update

from art_patch._lib.forking import closes_for_forks, got_on, late_import
from art_patch.errors import StoreError, StoreTooNew, WrongProject
from art_patch.store.backends.urls import of_another_project, without_password
from art_patch.store.schema import FIRST, tables

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
    from sqlalchemy.dialects.sqlite import Insert as SqliteInsert

Trouble = Callable[[str, Exception], None]
"""Told that the store had to be made anew: `store.gone` or `store.corrupt`, and an error that says more."""

POOL_LOGGER = "art_patch"

# The pool logs what it meets while it throws a broken connection away; we raise that very error ourselves.
logging.getLogger(f"sqlalchemy.pool.impl.QueuePool.{POOL_LOGGER}").setLevel(logging.CRITICAL + 1)


class Database(ABC):
    """An open database.

    Attributes:
        url: as given, with its password: never to be shown.
        name: the same without the password.
        project: whose store it has to be; `None` asks for nobody's.
        scope: values of the columns that say whose row it is; a write transaction hands them to its inserts.
        generation: grows whenever rows that were written may be gone: another file, or a server that was restarted.
        stale: the next write takes new connections.
    """

    def __init__(self, url: str, project: str | None) -> None:
        """Note the URL and the project; subclasses connect."""
        self.url = url
        self.project = project
        self.name = without_password(url)
        self.generation = 0
        self.stale = False
        self.scope = {"project_id": FIRST, "agent_id": FIRST}

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""

    @abstractmethod
    def read(self) -> AbstractContextManager[Connection]:
        """A short transaction that sees the store as it was when it began.

        Raises:
            StoreError: if the database refuses.
        """

    @abstractmethod
    def write(self, *, durable: bool = False, exclusive: bool = False) -> AbstractContextManager[Connection]:
        """A write transaction; commits at the end, rolls back on any error.

        Args:
            durable: committed when it survives a power cut. Without it the last commits may be lost, never torn.
            exclusive: no other write transaction runs meanwhile, for whoever must see all rows that refer to others.

        Raises:
            StoreError: if the database refuses.
        """

    @abstractmethod
    def renew(self) -> None:
        """Take new connections if the old ones are worth nothing.

        Raises:
            StoreError: if that fails; the next try begins where this one ended.
        """

    @abstractmethod
    def should_retry(self, error: StoreError) -> bool:
        """Whether the transaction that failed with `error` may succeed if it is tried again at once."""

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Turn the driver's errors into `StoreError` with the store's name and a cure."""

    @abstractmethod
    def insert(self, table: Table) -> SqliteInsert | PostgresInsert:
        """This database's INSERT, which knows `on_conflict_do_nothing` and `on_conflict_do_update`.

        Sort the rows by their key: two transactions that insert the same rows in another order wait for each other.
        """

    @abstractmethod
    def check(self, connection: Connection) -> list[str]:
        """What the database itself finds wrong with what it keeps."""

    @abstractmethod
    def begin_in_child(self) -> None:
        """Take new connections after a fork."""

    @abstractmethod
    def let_go(self) -> None:
        """Close the connections for a moment, because the process forks."""

    @abstractmethod
    def leave(self) -> None:
        """Before the interpreter takes the connections down: see that it does not harm another database."""

    def _bind(self, connection: Connection, *, binds: bool) -> None:
        """Look whose store it is; with `binds` it becomes the project's if it is nobody's, and the first of two wins.

        Raises:
            WrongProject: it is another project's.
        """
        if self.project is None:
            return
        ours = tables.projects.c.id == self.scope["project_id"]
        found = select(tables.projects.c.name).where(ours)
        if (owner := connection.scalar(found)) is None and binds:
            # Of two machines that bind it at once the second waits here, and then finds a name.
            nobodys = update(tables.projects).where(ours, tables.projects.c.name.is_(None))
            connection.execute(nobodys.values(name=self.project))
            owner = connection.scalar(found)
        if owner not in (None, self.project):
            raise WrongProject(of_another_project(self.url, str(owner), self.project))

    def _opened(self) -> None:
        _alive.add(self)
        closes_for_forks(self)


def revision_of(connection: Connection, found: set[str], name: str) -> str | None:
    """Return the schema's revision, `None` if there are no tables at all.

    Raises:
        StoreError: if the tables are not ours, or are those of a version that was never released.
    """
    # Other projects use alembic, too, and may well have a revision of our number.
    if {"alembic_version", "nodes"} <= found:
        if "projects" not in found:
            raise StoreError(
                f"{name} was made by a version of art_patch before its first release, which no release can read; "
                "move it away, or name another store with --store (ART_PATCH_STORE)"
            )
        return connection.scalar(text("SELECT version_num FROM alembic_version"))
    if found:
        raise StoreError(f"{name} is a database, but not a store of art_patch; name another one")
    return None


def upgrade(connection: Connection, revision: str | None, name: str, schema: str | None = None) -> None:
    """Make the tables, or migrate them, in the transaction of `connection`, which excludes every writer.

    Raises:
        StoreTooNew: if the revision is unknown here.
    """
    if revision is None:
        _make_tables(connection)
        return
    with late_import():  # alembic costs the app memory and time: only when needed
        for part in ("command", "config", "script"):
            import_module(f"alembic.{part}")
        from art_patch.store.schema.migrations import upgrade as migrate

    if not migrate(connection, revision, schema):
        raise StoreTooNew(
            f"store {name} was written by a newer release (revision {revision}, this one knows {tables.HEAD}); "
            "upgrade art-patch here, or name another store with ART_PATCH_STORE"
        )


_version = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""As alembic makes it."""


def _make_tables(connection: Connection) -> None:
    """Make what all migrations together make, at a tenth of the time: a short program exits before alembic has run."""
    for table in (*tables.metadata.sorted_tables, _version):
        # Without a look for it: PostgreSQL would find a table of that name in a later part of its search path.
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
