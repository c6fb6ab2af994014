r"""A store in a schema of a PostgreSQL server: pooled connections, advisory locks, and servers that restart.

Write transactions are READ COMMITTED and hold an advisory lock (`database.WRITERS`), which they share unless they
delete rows or migrate. Read transactions are REPEATABLE READ, so each one reads one snapshot, as on SQLite. `write()`
commits with `synchronous_commit=off`: a crash of the server may lose the commits of the last fraction of a second, each
of them completely. A lost connection may mean such a crash. So the next write connects again, makes missing tables
again, and raises `generation`, so that the writer repeats the messages it believed to be stored.

Characters that PostgreSQL cannot store are replaced by their Python escapes: NUL by `\x00`, a lone surrogate by
`\ud800`. NaN and the infinities become null in JSON.
"""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
from psycopg.types.string import StrDumperUnknown
from sqlalchemy import Connection, Engine, ExceptionContext, Table, create_engine, event, text
from sqlalchemy.dialects.postgresql import Insert
from sqlalchemy.exc import DBAPIError

from art_patch._lib.forking import in_database
from art_patch.errors import ConfigError, NotFound, StoreError
from art_patch.store.backends import database
from art_patch.store.backends.files import never_close
from art_patch.store.backends.scoping import limit_to_project
from art_patch.store.backends.urls import host_of, postgres_parameters
from art_patch.store.ledger.route import answers_for, answers_no_more

CONNECT_TIMEOUT_S = 5
WRITE_TIMEOUT_S = 30  # per statement: longer than any batch takes, shorter than the recorder waits at exit
EXCLUSIVE_TIMEOUT_S = 600  # also the wait until all other writers have finished
IDLE_TIMEOUT_S = 60  # then the server ends a transaction whose process hangs, and frees its locks

_DEFAULTS = {
    "connect_timeout": str(CONNECT_TIMEOUT_S),
    "application_name": "art_patch",
    "client_encoding": "utf8",
    # A lost network is noticed within half a minute. The kernel alone would take a quarter of an hour.
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_AGAIN = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_LOOK = """
    SELECT current_schema(), current_setting('server_encoding'),
           ARRAY(SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema()
                 UNION SELECT indexname FROM pg_indexes WHERE schemaname = current_schema())
"""


class PostgresDatabase(database.Database):
    """A store in one schema of a PostgreSQL server: the first schema in the connection's `search_path`."""

    def __init__(
        self, url: str, *, create: bool = True, project: str | None = None, trouble: database.Trouble | None = None
    ) -> None:
        super().__init__(url, create=create, project=project, trouble=trouble)
        self._parameters = _DEFAULTS | postgres_parameters(url)
        self._lock = threading.RLock()
        self._connect()
        try:
            with in_database():
                self._open(create=create)
        except BaseException:
            self.close()
            raise
        self.stale = False
        self._opened()
        answers_for(url, project, self)

    def close(self) -> None:
        """Close the connections to the server; `read_route` opens its own from then on."""
        answers_no_more(self.url, self.project, self)
        self._engine.dispose()

    @contextmanager
    def read(self) -> Generator[Connection]:
        """Return a short read-only transaction that sees the store as it was when the transaction began."""
        self.renew()
        with in_database(), self.errors(), self._reading.connect() as connection, connection.begin():
            self._check_project(connection)
            yield connection

    @contextmanager
    def write(self, *, durable: bool = False, exclusive: bool = False) -> Generator[Connection]:
        """Return a write transaction that commits when its block ends, and rolls back on any error.

        If the connection is lost during the commit, it may have succeeded: the caller must be able to repeat the write.
        """
        with in_database(), self.errors(), self._connected() as connection, connection.begin():
            connection.execution_options(**self.scope)
            timeout_s = EXCLUSIVE_TIMEOUT_S if exclusive else WRITE_TIMEOUT_S
            connection.exec_driver_sql(  # four statements in one round trip
                f"SET LOCAL synchronous_commit = {'on' if durable else 'off'};"
                f"SET LOCAL statement_timeout = '{timeout_s}s';"
                f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s';"
                + (database.WRITE_ALONE if exclusive else database.WRITE_SHARED)
            )
            self._check_project(connection)  # from here on, the tables cannot be dropped
            yield connection

    def renew(self) -> None:
        """Connect again if a connection was lost, and make the tables again if they are gone."""
        if not self.stale:
            return
        with self._lock, in_database():
            if not self.stale:  # another thread did it while this one waited
                return
            self._engine.dispose()
            if self._open():
                self._tell("store.gone", f"store {self.name}: the tables were gone, and were made anew")
            self._engine.clear_compiled_cache()  # in tables that were made anew, the project may have another id
            self.generation += 1
            self.stale = False

    def should_retry(self, error: StoreError) -> bool:
        """Return whether to try again: after a lost connection, or where PostgreSQL asks for it (a deadlock)."""
        return self.stale or _state(error) in _AGAIN

    def insert(self, table: Table) -> Insert:
        """Return an INSERT into `table` in PostgreSQL's dialect, to which the caller adds values and `ON CONFLICT`."""
        return Insert(table)

    @contextmanager
    def errors(self) -> Generator[None]:
        """Turn the driver's errors in the block into `StoreError`, whose message names the store and the remedy."""
        try:
            yield
        except DBAPIError as error:
            words = _words(error.orig)
            if "connection option" in words:  # libpq's term for a parameter in the URL's query
                raise ConfigError(f"{self.name}: {words}; mend the URL") from None
            failed = StoreError(f"store {self.name}: {words}; {_advice(words)}")
            failed.host = host_of(self.url)
            # No state: the connection broke. Else its class: connection, resources, operator, system.
            failed.may_pass = (getattr(error.orig, "sqlstate", None) or "08")[:2] in ("08", "53", "57", "58")
            raise failed from error

    def begin_in_child(self) -> None:
        """Use new connections in the child of a fork, and leave those of the parent process open."""
        self._lock = threading.RLock()
        never_close(self._engine)
        self._connect()

    def let_go(self) -> None:
        """Close idle connections before a fork: a child that inherits one keeps its locks if the parent dies."""
        self._engine.dispose()

    def leave(self) -> None:
        """Do nothing: on the interpreter's exit psycopg closes only connections that this process opened."""

    def _connect(self) -> None:
        self._engine = self._new_engine()
        self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def _new_engine(self) -> Engine:
        engine = create_engine(
            "postgresql+psycopg://",  # without host and password: SQLAlchemy shows its URL in messages
            connect_args=self._parameters,
            isolation_level="READ COMMITTED",  # whatever the server's default is
            pool_pre_ping=True,  # the server or a firewall may have closed an idle connection
            hide_parameters=True,  # they are users' texts, and SQLAlchemy would put them into messages
            use_native_hstore=False,  # saves a query on each new connection
            json_serializer=_dumps,
            pool_logging_name=database.POOL_LOGGER,
        )
        limit_to_project(engine.dialect, lambda: self.scope["project_id"])

        @event.listens_for(engine, "connect")
        def on_connect(connection: psycopg.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction] - an event handler
            connection.adapters.register_dumper(str, _Text)

        @event.listens_for(engine, "handle_error")
        def on_error(context: ExceptionContext) -> None:  # pyright: ignore[reportUnusedFunction] - an event handler
            self.stale = self.stale or context.is_disconnect

        return engine

    @contextmanager
    def _connected(self) -> Generator[Connection]:
        self.renew()
        connection = self._engine.connect()
        if self.stale:  # the pool's ping found a dead connection; the server may have restarted
            connection.close()
            self.renew()
            connection = self._engine.connect()
        with connection:
            yield connection

    def _open(self, *, create: bool = True) -> bool:
        """Check the tables, and make or migrate them; return whether there were none."""
        with self.errors(), self._engine.connect() as connection, connection.begin():
            if self._is_current(self._look(connection)):
                self._bind(connection)
                return False
            connection.exec_driver_sql(f"SET LOCAL statement_timeout = 0; {database.WRITE_ALONE}")
            revision = self._look(connection)  # another process may have migrated while we waited for the lock
            if revision is None and not create:
                raise NotFound(f"there is no store at {self.name}; run your agent with art_patch.patch() first")
            if not self._is_current(revision):
                database.upgrade(connection, revision, self.name, connection.scalar(text("SELECT current_schema()")))
            self._bind(connection)
            return revision is None

    def _look(self, connection: Connection) -> str | None:
        schema, encoding, found = connection.exec_driver_sql(_LOOK).one()
        if schema is None:
            raise StoreError(f"store {self.name}: no schema of its search_path exists; CREATE SCHEMA, or take it out")
        if encoding != "UTF8":
            raise StoreError(f"store {self.name} is encoded as {encoding}; CREATE DATABASE ... ENCODING 'UTF8'")
        return database.revision_of(connection, set(found), f"store {self.name} (schema {schema})")


class _Text(StrDumperUnknown):
    """Sends text as PostgreSQL can store it."""

    def dump(self, obj: str) -> bytes:
        return obj.encode("utf-8", "backslashreplace").replace(b"\0", rb"\x00")


def _dumps(value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))


def _state(error: StoreError) -> str | None:
    cause = error.__cause__
    return getattr(cause.orig, "sqlstate", None) if isinstance(cause, DBAPIError) else None


_ADVICE = (
    ("password", "check user and password in the URL, or name a file with PGPASSFILE"),
    ("pg_hba.conf", "the server does not let this user in from here: see its pg_hba.conf"),
    ("role ", "check the user in the URL, or CREATE ROLE"),
    ("database ", "check the database in the URL, or CREATE DATABASE"),
    ("for table projects", "this user is limited to another project; see `art-patch store grant`"),
    ("permission denied", "GRANT this user CREATE and USAGE on the schema, or give it a schema of its own"),
    ("read-only", "this server is a standby; name the primary"),
    ("too many", "raise the server's max_connections, or put a pooler before it"),
    ("No space left", "free some disk space on the server"),
    ("statement timeout", "the server is slow, or another transaction holds its locks; see pg_stat_activity"),
    ("SSL", "add ?sslmode=require or ?sslmode=disable to the URL, as the server wants it"),
    ("connection", "see that the server runs and can be reached from here"),
)


def _words(error: BaseException | None) -> str:
    """Return the server's main sentence; its detail is left out, because it may quote a user's text."""
    said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return said or " ".join(str(error).split())


def _advice(words: str) -> str:
    return next((cure for sign, cure in _ADVICE if sign in words), "see the message above")
