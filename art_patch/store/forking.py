"""What must not be half done when the process forks: our late imports, and our use of databases.

A module that is half imported in another thread at the fork stays so in the child, its lock held by a thread that does
not exist there: whoever imports it waits for ever, the app included. And SQLite keeps what it has locked in memory,
one table for the whole process: a child that inherits it believes that it holds locks which it does not hold. It then
waits for ever for a transaction that is its parent's, or loses its log when the parent closes the file. A child that
inherits the socket of a transaction on PostgreSQL keeps it, and its locks, alive when the parent dies.

So a fork waits until both are over, a few milliseconds as a rule, and the parent's connections are closed while it
happens; they open again when they are needed. A store that hangs delays a fork by `FORK_DEADLINE_S` at most; one that
is being made or migrated, as long as that gets on.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Protocol

from art_patch.native import Flag, RLock
from art_patch.store import progress

FORK_DEADLINE_S = 2.0
"""How long a fork may wait for a database that does not get on."""

IMPORT_DEADLINE_S = 30.0
"""How long it may wait for an import, which takes half a second, or some on a busy machine, and never hangs; or for all
tables or migrations of a store."""


class Holder(Protocol):
    """Holds connections to a database."""

    def let_go(self) -> None:
        """Close them; nobody is using them."""
        ...


_importing = RLock()
_gate = RLock()
_inside: deque[None] = deque()
_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def closes_for_forks(holder: Holder) -> None:
    """Have `holder` let go of its connections when the process forks."""
    _holders.add(holder)


@contextmanager
def late_import() -> Generator[None]:
    """Import in here; forks wait."""
    with _importing:
        yield


@contextmanager
def in_database() -> Generator[None]:
    """Use a database in here; forks wait."""
    with _gate:
        _inside.append(None)
    try:
        yield
    finally:
        with suppress(IndexError):  # a child that was forked in here, by the very thread
            _inside.pop()


def _before_fork() -> None:
    _importing.acquire(timeout=IMPORT_DEADLINE_S)
    deadline = time.monotonic() + FORK_DEADLINE_S
    _gate.acquire(timeout=max(0.0, deadline - time.monotonic()))
    never, latest, steps = Flag(), time.monotonic() + IMPORT_DEADLINE_S, progress.steps(imports=False)
    while _inside and time.monotonic() < deadline:
        never.wait(0.001)
        if (now := progress.steps(imports=False)) > steps:
            steps, deadline = now, min(time.monotonic() + FORK_DEADLINE_S, latest)
    if not _inside:
        for holder in list(_holders):
            with suppress(Exception):
                holder.let_go()


def _after_fork_in_parent() -> None:
    for lock in (_gate, _importing):
        with suppress(RuntimeError):  # the deadline passed, so it is not ours
            lock.release()


def _after_fork_in_child() -> None:
    global _importing, _gate
    _importing, _gate = RLock(), RLock()
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
