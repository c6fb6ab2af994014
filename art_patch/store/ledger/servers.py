"""The servers of a project: each one that runs keeps a row with its address, its process and its newest sign of life.

A server announces itself when it is ready, renews its row while it is well, marks it when it begins to stop, and
deletes it at the end. A server that was killed leaves its row behind; the others delete it. The rows decide nothing by
themselves: the route, which apps read, names one server (`Ledger.set_engine`), and `pipeline.ServingUpkeep` tells when
another one takes it over. As with a lease, no decision uses the times; they are shown to people only.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import delete, select

from art_patch._lib.process import Owner
from art_patch.store.backends.database import Part
from art_patch.store.ledger.decisions import set_control
from art_patch.store.schema import tables
from art_patch.types import JSON

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
