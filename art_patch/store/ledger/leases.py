"""What running processes hold in the store: leases, which are locks over all machines, and the rows of servers.

A lease lets only one process run a cycle. Its token proves that the process still owns the lease.

The row of a lease names the owner, counts how often the owner renewed the lease (`beat`), and has a token that only
grows. A process takes the lease by adding one to the token in a statement that matches only if the row is unchanged
since the process read it. So exactly one of many processes succeeds. `_lib.process` decides whether an owner is gone.
No decision uses the times in a lease or a server's row; they are shown to people only.

The token is a fence: in the database that `fenced` returns, each write transaction first checks that the token is still
ours and locks the row until the transaction ends. So an owner that lost the lease while it was suspended can write
nothing afterwards.

Each server that runs keeps a row with its address, its process and its newest sign of life. It announces itself when it
is ready, renews its row while it is well, marks it when it begins to stop, and deletes it at the end. A server that was
killed leaves its row behind; the others delete it. The rows decide nothing by themselves: the route, which apps read,
names one server (`Ledger.set_engine`), and `pipeline.ServingUpkeep` tells when another one takes it over.
"""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from sqlalchemy import Connection, Row, delete, select, update

from art_patch._lib.process import Owner
from art_patch.errors import Busy
from art_patch.store.backends.database import Database, Part
from art_patch.store.ledger.decisions import note, set_control
from art_patch.store.schema import tables
from art_patch.types import JSON


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as it was when it was read."""

    name: str
    token: int = 0  # grows by one each time the lease changes hands; 0 before the first owner
    beat: int = 0  # grows by one each time the owner renews the lease; 0 when it is taken
    owner: Owner | None = None  # the process that has the lease; `None` if it is free
    # When it was taken or renewed, by the owner's clock. It is only shown to people, because the clocks of two machines
    # may differ.
    renewed_at: float | None = None


class Leases(Part):
    """Reads, takes, renews and releases the leases of a store."""

    def read(self, name: str) -> Lease:
        """Return the lease `name` as it is now, with its owner; a lease that was never taken is free."""
        table = tables.leases
        with self._database.read() as connection:
            row = connection.execute(select(table).where(table.c.name == name)).first()
        return Lease(name) if row is None else _lease(row)

    def take(self, seen: Lease, owner: Owner, *, who: str, now: float) -> Lease | None:
        """Take a free or abandoned lease as `read` returned it, audited; `None` if it has changed since."""
        table = tables.leases
        taken = Lease(seen.name, seen.token + 1, 0, owner, now)
        before = None if seen.owner is None else seen.owner.id
        unchanged = (table.c.name == seen.name, table.c.token == seen.token, table.c.beat == seen.beat)
        with self._database.write(durable=True) as connection:
            # The update below compares a row, so there has to be one.
            empty = self._database.insert(table).values(name=seen.name, token=0, beat=0)
            connection.execute(empty.on_conflict_do_nothing())
            # A condition on what was seen, instead of a lock between reading and writing: of many that try, exactly one
            # finds the row unchanged.
            values = _owner_columns(owner) | {"token": taken.token, "beat": 0, "renewed_at": now}
            same_owner = table.c.owner.is_(None) if before is None else table.c.owner == before
            if not connection.execute(update(table).where(*unchanged, same_owner).values(values)).rowcount:
                return None
            if seen.owner is not None:
                detail = {"lease": seen.name, "token": taken.token, "from": str(seen.owner), "to": str(owner)}
                note(connection, who, "lease taken over", detail, now)
        return taken

    def renew(self, lease: Lease, *, now: float) -> bool:
        """Add one to the lease's `beat`, which shows that the owner is alive; return `False` if it lost the lease."""
        table = tables.leases
        mine = update(table).where(table.c.name == lease.name, table.c.token == lease.token, table.c.owner.is_not(None))
        with self._database.write() as connection:
            return bool(connection.execute(mine.values(beat=table.c.beat + 1, renewed_at=now)).rowcount)

    def release(self, lease: Lease) -> bool:
        """Give the lease up, so that another process can take it; return `False` if it has another owner by now."""
        table = tables.leases
        mine = update(table).where(table.c.name == lease.name, table.c.token == lease.token)
        with self._database.write(durable=True) as connection:
            return bool(connection.execute(mine.values(dict.fromkeys(_owner_columns(None)))).rowcount)


def fenced(database: Database, lease: Lease) -> Database:
    """Return a view of the database whose writes raise `Busy` and write nothing once the lease has another owner."""
    return cast("Database", _Fenced(database, lambda connection: _require(connection, lease)))


class _Fenced:
    """A database that checks a condition at the start of every write, and is otherwise the wrapped one."""

    def __init__(self, database: Database, require: Callable[[Connection], None]) -> None:
        self._database = database
        self._require = require

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    @contextmanager
    def write(self, *, durable: bool = False, exclusive: bool = False) -> Generator[Connection]:
        with self._database.write(durable=durable, exclusive=exclusive) as connection:
            self._require(connection)
            yield connection


def _require(connection: Connection, lease: Lease) -> None:
    its, project_id = tables.whole.leases.c, connection.get_execution_options()["project_id"]
    # FOR SHARE locks the row: on PostgreSQL no process can take the lease before this transaction has ended. SQLite has
    # one writer and ignores it. `whole`: in a limited table's subquery, all of the project's leases would be locked.
    query = select(its.token).where(its.project_id == project_id, its.name == lease.name, its.owner.is_not(None))
    if connection.scalar(query.with_for_update(read=True)) != lease.token:
        raise lost(lease)


def lost(lease: Lease) -> Busy:
    """Return the error that an owner gets when it writes after another process took its lease."""
    return Busy(
        f"the lease on this store's {lease.name} was taken over by another process, because this one was not heard of; "
        "it changed nothing since, and what it had kept before is kept. See `art-patch status`, and run it again"
    )


def _owner_columns(owner: Owner | None) -> dict[str, Any]:
    if owner is None:
        return dict.fromkeys(("owner", "host", "pid", "boot", "started"))
    return {"owner": owner.id, "host": owner.host, "pid": owner.pid, "boot": owner.boot, "started": owner.started}


def _lease(row: Row[Any]) -> Lease:
    owner = None if row.owner is None else Owner(row.owner, row.host, row.pid, row.boot, row.started)
    return Lease(row.name, row.token, row.beat, owner, row.renewed_at)


_KEY = "server "  # begins the keys of the rows of `control` that are servers; the owner's id ends them


@dataclass(frozen=True, slots=True)
class Server:
    """A server as its row says."""

    base_url: str  # the address that apps call, ending in `/v1`
    owner: Owner  # its process
    since: float  # when it was ready, by its own clock
    renewed_at: float  # its newest sign of life, by its own clock
    beat: int = 0  # grows by one with each sign of life
    leaving: bool = False  # whether it is about to stop, and answers until another server has the route


def _known(record: type, fields: JSON) -> dict[str, Any]:
    """Return the fields that this release knows: a server of a newer one may run beside it, and tell more."""
    return {name: value for name, value in fields.items() if name in record.__slots__}


class Servers(Part):
    """Lists, announces, renews and removes the servers of a project."""

    def all(self) -> tuple[Server, ...]:
        """Return the servers that have a row, the newest first."""
        table = tables.control.c
        with self._database.read() as connection:
            rows = connection.scalars(select(table.value).where(table.key.startswith(_KEY, autoescape=True))).all()
        found = (json.loads(row) for row in rows)
        servers = [Server(owner=Owner(**_known(Owner, each.pop("owner"))), **_known(Server, each)) for each in found]
        return tuple(sorted(servers, key=lambda server: (server.since, server.owner.id), reverse=True))

    def announce(self, base_url: str, owner: Owner, *, now: float) -> Server:
        """Add the row of a server that is ready."""
        return self._keep(Server(base_url, owner, now, now))

    def renew(self, server: Server, *, leaving: bool = False, now: float) -> Server:
        """Note a sign of life, and return the server as its row says now.

        A row that another server deleted, because it did not hear of this one for long, is written again.
        """
        return self._keep(replace(server, beat=server.beat + 1, renewed_at=now, leaving=leaving))

    def remove(self, server: Server) -> None:
        """Delete the row of a server that has ended."""
        table = tables.control
        with self._database.write() as connection:
            connection.execute(delete(table).where(table.c.key == _KEY + server.owner.id))

    def _keep(self, server: Server) -> Server:
        # Only the server itself writes its row, so no other write has to be excluded.
        with self._database.write() as connection:
            set_control(connection, _KEY + server.owner.id, json.dumps(asdict(server)))
        return server
