"""What trackers have already, so that sending to one again writes nothing twice.

A row is one thing at one target: a span, a score, the metrics of a policy. Its digest tells whether it changed since. A
row is written after its target took the thing: whoever is killed in between sends it once more, and never too little.
Rows go with their trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import select

from art_patch.store.backends.database import Database
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables


@dataclass(frozen=True, slots=True)
class SentItem:
    """One thing that a target has.

    Attributes:
        item: its key, unique at the target.
        digest: of what was sent; another one is another state of the same thing.
        trajectory_id: whose data it is; `None` for a policy's.
    """

    item: str
    digest: str
    trajectory_id: str | None = None


class Sent:
    """Notes on what was sent to trackers."""

    def __init__(self, database: Database) -> None:
        """Read and write through `database`."""
        self._database = database

    def digests(self, target: str, items: Sequence[str]) -> dict[str, str]:
        """Return the digest of each of these items that the target has."""
        table = tables.sent.c
        with self._database.read() as connection:
            return {
                item: digest
                for some in some_of(items)
                for item, digest in connection.execute(
                    select(table.item, table.digest).where(table.target == target, table.item.in_(some))
                )
            }

    def add(self, target: str, items: Sequence[SentItem], *, now: float) -> None:
        """Note that the target has these now; an item that it had is replaced."""
        if not items:
            return
        rows = [
            {"target": target, "item": one.item, "trajectory_id": one.trajectory_id, "digest": one.digest, "at": now}
            for one in items
        ]
        new = self._database.insert(tables.sent)
        changes = {"digest": new.excluded.digest, "at": new.excluded.at}
        with self._database.write(durable=True) as connection:
            connection.execute(
                new.on_conflict_do_update(index_elements=list(tables.sent.primary_key), set_=changes), rows
            )
