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
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Protocol

from art_patch._lib import progress
from art_patch._lib.os_threads import Flag, RLock, get_ident

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


_gate = RLock()
"""Held while a thread begins its first section, and by a fork from the beginning of its wait to its end."""

_one_import = RLock()
"""Modules of ours that import each other are not imported by two threads at once."""

_inside: dict[int, list[float]] = {}
"""Thread -> its sections, outermost first: how many seconds each may take before it counts as hung."""

_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def closes_for_forks(holder: Holder) -> None:
    """Have `holder` let go of its connections when the process forks."""
    _holders.add(holder)


@contextmanager
def _section(hung_after_s: float) -> Generator[None]:
    """Let forks wait for what is done in here.

    A thread that is in a section already never waits at the gate: a fork may wait for that very thread.
    """
    me = get_ident()
    if (mine := _inside.get(me)) is None:
        with _gate:
            mine = _inside.setdefault(me, [])
    mine.append(hung_after_s)
    try:
        yield
    finally:
        mine.pop()
        if not mine:
            _inside.pop(me, None)


@contextmanager
def late_import() -> Generator[None]:
    """Import in here; forks wait."""
    with _section(IMPORT_DEADLINE_S), _one_import:
        yield
        progress.got_on()  # what follows in the same transaction has its own time


@contextmanager
def in_database() -> Generator[None]:
    """Use a database in here; forks wait."""
    with _section(FORK_DEADLINE_S):
        yield


def _before_fork() -> None:
    latest = time.monotonic() + IMPORT_DEADLINE_S
    _gate.acquire(timeout=IMPORT_DEADLINE_S)
    never, steps, got_on_at = Flag(), -1, 0.0
    while others := _inside.keys() - {get_ident()}:
        now = time.monotonic()
        if (reached := progress.steps(imports=False)) != steps:
            steps, got_on_at = reached, now
        # A thread that imports inside its transaction may take as long as an import.
        patience_s = max((max(_inside.get(other) or [0.0]) for other in others), default=0.0)
        if now >= min(latest, got_on_at + patience_s):
            break
        never.wait(0.001)
    if not _inside:
        for holder in list(_holders):
            with suppress(Exception):
                holder.let_go()


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):  # the deadline passed, so it is not ours
        _gate.release()


def _after_fork_in_child() -> None:
    global _gate, _one_import
    _gate, _one_import = RLock(), RLock()
    for other in _inside.keys() - {get_ident()}:
        del _inside[other]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
