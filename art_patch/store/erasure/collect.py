"""Garbage collection of shared content: messages, blocks of prompt ids and tools that no row refers to any more.

In: ids of the messages, blocks and tools that a deleted call referred to. Out: the number of deleted rows. A message is
kept while a later message of a conversation, a call or an answer refers to it. So the collector checks the last message
of a conversation first; after it has deleted a message, it checks the message before it (its parent).

Rules. Ids that are still to be checked are stored in the row `collecting` of the table `control`. They are written in
the transaction that deletes the calls, so if the process is killed, the next collection checks them. A transaction
stops after `BUDGET_S` seconds. Then the collector pauses for as long as the transaction took, at most 0.1 s, so that
apps can write.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, bindparam, delete, exists, null, select

from art_patch.store.backends.database import Database
from art_patch.store.ledger.decisions import control_of, set_control
from art_patch.store.queries.loading import some_of
from art_patch.store.schema import tables
from art_patch.store.write import COLLECTED
from art_patch.trajectories import ROOT

# Row of `control` with the candidates that are still to be checked, as JSON of hex ids.
PENDING = "collecting"

# A transaction begins no further step after this time. The step in progress and the commit come on top.
BUDGET_S = 0.015

_STEP = 200  # ids in one statement
_SWEEP = 2_000  # rows that one read of the full sweep looks at
_BLOBS_AT_ONCE = 50_000  # each turn reads all calls once; about 8 MiB
_PAUSE_S = 0.002


class _Kind:
    """A table of shared content, with its statements. Building a statement takes longer than SQLite takes to run it."""

    def __init__(self, table: Table, *references: ColumnElement[Any]) -> None:
        some, parent = table.c.id.in_(bindparam("ids", expanding=True)), table.c.get("parent")
        if parent is not None:
            references = (table.alias("children").c.parent, *references)
        unheld = [~exists().where(column == table.c.id) for column in references]
        self.orphans = select(table.c.id, null() if parent is None else parent).where(some, *unheld)
        self.delete = delete(table).where(some)
        self.after = select(table.c.id).where(table.c.id > bindparam("last")).order_by(table.c.id).limit(_SWEEP)


_KINDS = {
    "nodes": _Kind(tables.nodes, tables.calls.c.prompt, tables.choices.c.answer),
    "token_blocks": _Kind(tables.token_blocks, tables.calls.c.prompt_block),
    "blobs": _Kind(tables.blobs, tables.calls.c.tools),
}
_CHAINS = ("nodes", "token_blocks")  # kinds whose rows have parents; they are collected by climbing


class Pending:
    """Ids still to be checked: `nodes` (messages), `token_blocks` (prompt ids) and `blobs` (lists of tools)."""

    def __init__(self) -> None:
        self.ids: dict[str, set[bytes]] = {kind: set() for kind in _KINDS}
        self._stored = ""

    @classmethod
    def load(cls, connection: Connection) -> Pending:
        """Read the ids that earlier transactions stored and no collection has checked yet."""
        pending = cls()
        pending._stored = control_of(connection, PENDING) or ""
        for kind, found in json.loads(pending._stored or "{}").items():
            pending.ids[kind] = {bytes.fromhex(one) for one in found}
        return pending

    def add(self, kind: str, ids: Iterable[bytes | None]) -> None:
        """Add ids of one kind to check. `None` and the root of all conversations are skipped."""
        self.ids[kind].update(one for one in ids if one is not None and one != ROOT)

    def save(self, connection: Connection) -> None:
        """Store the ids that are still unchecked. The next transaction, in this or another process, checks them."""
        kept = {kind: sorted(one.hex() for one in ids) for kind, ids in self.ids.items() if ids}
        value = json.dumps(kept) if kept else ""
        if value != self._stored:
            set_control(connection, PENDING, value)

    @property
    def chains(self) -> bool:
        """Whether messages or token blocks are still to be checked."""
        return any(self.ids[kind] for kind in _CHAINS)


@contextmanager
def alone(database: Database) -> Generator[Connection]:
    """Return a transaction for deleting: it excludes other writers, and SQLite overwrites deleted data with zeros."""
    with database.write(durable=True, exclusive=True) as connection:
        if connection.dialect.name == "sqlite":  # set on every connection already; erasing does not rely on it
            connection.exec_driver_sql("PRAGMA secure_delete=ON")
        yield connection


def breathe(began: float) -> None:
    """Let other writers in: sleep as long as the transaction took since `began` (`perf_counter()`), at most 0.1 s."""
    # A process that releases a file lock and takes it again at once gets it before all that wait.
    time.sleep(max(_PAUSE_S, min(time.perf_counter() - began, 0.1)))


def climb(connection: Connection, pending: Pending, until: float) -> Counter[str]:
    """Delete pending messages and token blocks that no row refers to, then their parents; return how many, by kind.

    It ends when nothing is pending, or at `until` (`time.perf_counter()`). Checked ids are removed from `pending`, and
    the parents of deleted rows are added. `connection` is a transaction of `alone`.
    """
    gone: Counter[str] = Counter()
    got_on = False
    for kind in _CHAINS:
        waiting = pending.ids[kind]
        # At least one step: on a slow disk the time may be over before the first, and then nothing would ever end.
        while waiting and (not got_on or time.perf_counter() < until):
            got_on = True
            some = [waiting.pop() for _ in range(min(_STEP, len(waiting)))]
            orphans = _orphans(connection, kind, some)
            gone[kind] += _delete(connection, kind, [key for key, _ in orphans])
            pending.add(kind, (parent for _, parent in orphans))
    if gone.total():
        note_collected(connection)
    return gone


def collect(database: Database, candidates: Mapping[str, Collection[bytes]] | None = None) -> Counter[str]:
    """Delete the shared content that no row refers to any more; return the number of deleted rows by kind.

    It checks `candidates` (ids by kind), the ids that an earlier collection left unchecked, and all their ancestors.
    """
    gone: Counter[str] = Counter()
    for some in _portions(candidates or {}):
        while True:
            began = time.perf_counter()
            with alone(database) as connection:
                pending = Pending.load(connection)
                for kind, ids in some.items():
                    pending.add(kind, ids)
                some = {}
                gone += climb(connection, pending, time.perf_counter() + BUDGET_S)
                pending.save(connection)
            breathe(began)
            if not pending.chains:
                break
    return gone + collect_blobs(database)


def collect_all(database: Database) -> Counter[str]:
    """Delete every row of shared content that no other row refers to, with bounded memory and in short transactions."""
    gone = collect(database)
    for kind in _CHAINS:
        for ids in _all_ids(database, kind):
            with database.read() as connection:
                orphans = [key for part in some_of(ids, _STEP) for key, _ in _orphans(connection, kind, part)]
            if orphans:
                gone += collect(database, {kind: orphans})
    held: list[bytes] = []
    for ids in _all_ids(database, "blobs"):
        held += ids
        if len(held) >= _BLOBS_AT_ONCE:
            gone += _delete_blobs(database, held)
            held = []
    return gone + _delete_blobs(database, held)


def collect_blobs(database: Database) -> Counter[str]:
    """Delete those pending lists of tools that no call uses any more; return the number of deleted rows."""
    with database.read() as connection:
        candidates = Pending.load(connection).ids["blobs"]
    if not candidates:
        return Counter()
    gone = _delete_blobs(database, candidates)
    with alone(database) as connection:
        pending = Pending.load(connection)
        pending.ids["blobs"] -= candidates
        pending.save(connection)
    return gone


def _delete_blobs(database: Database, candidates: Collection[bytes]) -> Counter[str]:
    # `calls.tools` has no index, so this reads all calls. It does so before it takes the lock. Under the lock it checks
    # again only the candidates that seemed unused, because an app may have used one meanwhile.
    gone: Counter[str] = Counter()
    unused = set(candidates)
    if unused:
        with database.read() as connection:
            calls = select(tables.calls.c.tools).where(tables.calls.c.tools.is_not(None))
            if len(unused) <= _STEP:
                calls = calls.where(tables.calls.c.tools.in_(sorted(unused))).distinct()
            for (tools,) in connection.execution_options(yield_per=_SWEEP).execute(calls):
                unused.discard(tools)
    for part in some_of(sorted(unused), _STEP):
        began = time.perf_counter()
        with alone(database) as connection:
            some = [key for key, _ in _orphans(connection, "blobs", part)]
            if some:
                gone["blobs"] += _delete(connection, "blobs", some)
                note_collected(connection)
        breathe(began)
    return gone


def note_collected(connection: Connection) -> None:
    """Tell the writers in all processes, in the transaction that deletes, that messages they remember may be gone."""
    # Writers remember which messages they wrote, and do not write them again. A writer that finds another number here
    # forgets them all.
    set_control(connection, COLLECTED, str(int(control_of(connection, COLLECTED) or "0") + 1))


def _orphans(connection: Connection, kind: str, ids: Sequence[bytes]) -> list[tuple[bytes, bytes | None]]:
    """Return the ids that no row refers to, each with its parent."""
    return [(key, parent) for key, parent in connection.execute(_KINDS[kind].orphans, {"ids": ids})]


def _delete(connection: Connection, kind: str, ids: Sequence[bytes]) -> int:
    if ids:
        connection.execute(_KINDS[kind].delete, {"ids": ids})
    return len(ids)


def _all_ids(database: Database, kind: str) -> Generator[list[bytes]]:
    last = ROOT
    while True:
        with database.read() as connection:
            ids = list(connection.scalars(_KINDS[kind].after, {"last": last}))
        if not ids:
            return
        yield ids
        last = ids[-1]


def _portions(candidates: Mapping[str, Collection[bytes]]) -> Generator[dict[str, Sequence[bytes]]]:
    """Return the candidates in portions, because `control` holds one portion as a text."""
    yield {}  # for the candidates that an earlier collection left
    for kind, ids in candidates.items():
        yield from ({kind: some} for some in some_of(list(ids), _SWEEP))
