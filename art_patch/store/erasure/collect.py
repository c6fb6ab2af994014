"""Garbage collection: messages, blocks of prompt ids and tools that nothing refers to any more.

In: ids that a deleted call referred to. Out: how many rows went. A message stays while a message below it, a call or
an answer refers to it, so the walk begins at the leaves and climbs as long as nothing holds it.

Rules. What is still to be looked at stands in the store (`control`, row `collecting`), written in the transaction that
deleted the calls: whoever is killed leaves no orphan that nobody knows of, the next collection goes on with it. A
transaction stops after `BUDGET_S` and the lock is free for at least as long, so that apps go on writing. Writers
remember which messages they wrote and skip them: each transaction that deletes bumps row `collected`, and a writer
that finds another number there forgets what it remembered. What is deleted is overwritten with zeros.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Table,
    bindparam,
    delete,
    exists,
    insert,
    null,
    select,
    update,
)

from art_patch.store.backends.database import Database
from art_patch.store.schema import EVERY_AGENT, tables
from art_patch.store.write import COLLECTED
from art_patch.trajectories import ROOT

PENDING = "collecting"
"""Row of `control` that holds what is still to be looked at, as JSON of hex ids."""

BUDGET_S = 0.015
"""How long a transaction goes on deleting; what it has begun, its commit included, comes on top."""

_STEP = 200  # ids in one statement
_SWEEP = 2_000  # rows that one read of the full sweep looks at
_BLOBS_AT_ONCE = 50_000  # each turn reads all calls once; about 8 MiB
_PAUSE_S = 0.002


class _Kind:
    """A table of what others refer to. Its statements are made once: making one costs more than SQLite's part."""

    def __init__(self, table: Table, parent: ColumnElement[Any] | None, *references: ColumnElement[Any]) -> None:
        some = table.c.id.in_(bindparam("ids", expanding=True))
        held = [exists().where(column == table.c.id) for column in references]
        self.table = table
        self.orphans = select(table.c.id, null() if parent is None else parent).where(some, *(~one for one in held))
        self.delete = delete(table).where(some)
        self.after = select(table.c.id).where(table.c.id > bindparam("last")).order_by(table.c.id).limit(_SWEEP)


_KINDS = {
    "nodes": _Kind(
        tables.nodes,
        tables.nodes.c.parent,
        tables.nodes.alias("children").c.parent,
        tables.calls.c.prompt,
        tables.choices.c.answer,
    ),
    "token_blocks": _Kind(
        tables.token_blocks,
        tables.token_blocks.c.parent,
        tables.token_blocks.alias("children").c.parent,
        tables.calls.c.prompt_block,
    ),
    "blobs": _Kind(tables.blobs, None, tables.calls.c.tools),
}
_CHAINS = ("nodes", "token_blocks")


class Pending:
    """Candidates that are still to be looked at: by kind (`nodes`, `token_blocks`, `blobs`), sets of ids."""

    def __init__(self) -> None:
        """Begin empty."""
        self.ids: dict[str, set[bytes]] = {kind: set() for kind in _KINDS}
        self._stored = ""

    @classmethod
    def load(cls, connection: Connection) -> Pending:
        """Return what the transactions before this one left."""
        pending = cls()
        pending._stored = _control(connection, PENDING) or ""
        for kind, found in json.loads(pending._stored or "{}").items():
            pending.ids[kind] = {bytes.fromhex(one) for one in found}
        return pending

    def add(self, kind: str, ids: Iterable[bytes | None]) -> None:
        """Add candidates; `None` and the root are none."""
        self.ids[kind].update(one for one in ids if one is not None and one != ROOT)

    def save(self, connection: Connection) -> None:
        """Keep what is left for the next transaction, or for whoever comes after a kill."""
        kept = {kind: sorted(one.hex() for one in ids) for kind, ids in self.ids.items() if ids}
        value = json.dumps(kept) if kept else ""
        if value != self._stored:
            _set_control(connection, PENDING, value)

    @property
    def chains(self) -> bool:
        """Whether messages or blocks are left."""
        return any(self.ids[kind] for kind in _CHAINS)


@contextmanager
def alone(database: Database) -> Generator[Connection]:
    """A transaction that deletes: no other writer beside it, and what it deletes is overwritten."""
    with database.write(durable=True, exclusive=True) as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA secure_delete=ON")
        yield connection


def breathe(began: float) -> None:
    """Leave the lock to others for as long as we had it: the kernel does not hand it round by itself.

    Args:
        began: `time.perf_counter()` when the transaction began.
    """
    time.sleep(max(_PAUSE_S, min(time.perf_counter() - began, 0.1)))


def climb(connection: Connection, pending: Pending, until: float) -> Counter[str]:
    """Delete orphans among the candidates and above them, until all are looked at or the time is over.

    It gets on by a step at least: what a slow disk takes to begin may be longer than the time.

    Args:
        connection: of a transaction that is `alone`.
        pending: candidates; those that were looked at are taken out, parents of what was deleted come in.
        until: `time.perf_counter()` at which to stop.

    Returns:
        Rows deleted, by kind.
    """
    gone: Counter[str] = Counter()
    got_on = False
    for kind in _CHAINS:
        waiting = pending.ids[kind]
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
    """Delete what nobody refers to among the candidates and above them, and what an earlier collection left.

    Args:
        database: the store.
        candidates: ids by kind: `nodes`, `token_blocks`, `blobs`.

    Returns:
        Rows deleted, by kind.
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
    """Delete every orphan there is; memory is bounded, and the lock is held for a chunk at a time."""
    gone = collect(database)
    for kind in _CHAINS:
        for ids in _all_ids(database, kind):
            with database.read() as connection:
                parts = [ids[start : start + _STEP] for start in range(0, len(ids), _STEP)]
                orphans = [key for part in parts for key, _ in _orphans(connection, kind, part)]
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
    """Delete the tools among the pending candidates that no call has any more."""
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
    # No index has the tools of calls, so whoever still uses a candidate is looked for before the lock is taken;
    # under it only what seemed unused is asked for again.
    gone: Counter[str] = Counter()
    unused = set(candidates)
    if unused:
        with database.read() as connection:
            calls = select(tables.calls.c.tools).where(tables.calls.c.tools.is_not(None))
            if len(unused) <= _STEP:
                calls = calls.where(tables.calls.c.tools.in_(sorted(unused))).distinct()
            for (tools,) in connection.execution_options(yield_per=_SWEEP).execute(calls):
                unused.discard(tools)
    listed = sorted(unused)
    for start in range(0, len(listed), _STEP):
        began = time.perf_counter()
        with alone(database) as connection:
            some = [key for key, _ in _orphans(connection, "blobs", listed[start : start + _STEP])]
            if some:
                gone["blobs"] += _delete(connection, "blobs", some)
                note_collected(connection)
        breathe(began)
    return gone


def note_collected(connection: Connection) -> None:
    """Tell writers, in the transaction that deletes, that what they remember may be gone."""
    _set_control(connection, COLLECTED, str(int(_control(connection, COLLECTED) or "0") + 1))


def _orphans(connection: Connection, kind: str, ids: Sequence[bytes]) -> list[tuple[bytes, bytes | None]]:
    """Return those that nothing refers to, each with its parent."""
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


def _portions(candidates: Mapping[str, Collection[bytes]]) -> Generator[dict[str, list[bytes]]]:
    """Bound what stands in the store at once; the first portion is empty and takes what was left before."""
    yield {}
    for kind, ids in candidates.items():
        listed = list(ids)
        for start in range(0, len(listed), _SWEEP):
            yield {kind: listed[start : start + _SWEEP]}


def _control(connection: Connection, key: str) -> str | None:
    return connection.scalar(select(tables.control.c.value).where(tables.control.c.key == key))


def _set_control(connection: Connection, key: str, value: str) -> None:
    table, values = tables.control, {"value": value, "updated_at": time.time()}
    if not connection.execute(update(table).where(table.c.key == key).values(values)).rowcount:
        connection.execute(insert(table).values(values | {"key": key, "agent_id": EVERY_AGENT}))
