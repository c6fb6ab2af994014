"""Delays a fork of the process while art_patch imports modules or uses a database, because both break in the child.

- If another thread is importing a module at the moment of the fork, the module stays half imported in the child, and
  its import lock is held by a thread that does not exist there. Code that imports the module in the child, even the
  app's own, waits forever.
- SQLite keeps its locks in memory, in one table per process. A child that inherits the table believes that it holds
  locks. It waits forever for a transaction of its parent, or loses its write-ahead log when the parent closes the file.
- A child that inherits the socket of a PostgreSQL transaction keeps the transaction and its locks alive after the
  parent has died.

So a fork waits until both kinds of work are over, usually a few milliseconds. Before the fork the parent's connections
are closed; each is opened again at its next use. A store that hangs delays a fork by at most `FORK_DEADLINE_S`.
"""

import os
import sys
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Protocol

from art_patch._lib.os_threads import Flag, RLock, get_ident

FORK_DEADLINE_S = 2.0  # how long a fork may wait for a database that makes no progress

IMPORT_DEADLINE_S = 30.0
"""How long a fork may wait for an import, or for all tables or migrations of a store. An import takes half a second, a
few on a busy machine, and never hangs."""


class Holder(Protocol):
    """An object that holds database connections, which must be closed before the process forks."""

    def let_go(self) -> None:
        """Close the object's database connections; called before a fork, while no thread uses them."""
        ...


# Held while a thread begins its first section, and by a fork from the beginning of its wait to its end.
_gate = RLock()

# Modules of ours that import each other are not imported by two threads at once.
_one_import = RLock()

_inside: dict[int, list[float]] = {}
"""Thread -> its sections, outermost first: the seconds that each may take before it counts as hung."""

_holders: weakref.WeakSet[Holder] = weakref.WeakSet()

# A list and not a number: `append` is atomic, `+= 1` from two threads may lose a step.
_steps: list[None] = []


def got_on() -> None:
    """Report that one more step of an opening store is done, so that waiting code does not give up."""
    _steps.append(None)


def steps(*, imports: bool) -> int:
    """Return a number that grows while a store is being opened: its finished steps, with `imports` modules too."""
    return len(_steps) + (len(sys.modules) if imports else 0)


def closes_for_forks(holder: Holder) -> None:
    """Register an object so that its database connections are closed before each fork of the process."""
    _holders.add(holder)


@contextmanager
def _section(hung_after_s: float) -> Generator[None]:
    """Let forks wait for the block."""
    me = get_ident()
    # A thread that is in a section already must not wait at the gate: a fork may be waiting for that very thread.
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
    """Delay forks of the process while the block imports modules."""
    with _section(IMPORT_DEADLINE_S), _one_import:
        yield
        got_on()  # what follows in the same transaction has its own time


def no_more_imports(timeout_s: float) -> None:
    """Wait until no thread of ours imports modules, and let none begin. Called last before the interpreter goes down.

    A thread that is stopped in an import holds the module's lock for ever, and a finaliser that imports the same module
    waits for it.
    """
    _one_import.acquire(timeout=timeout_s)


@contextmanager
def in_database() -> Generator[None]:
    """Delay forks of the process while the block uses a database."""
    with _section(FORK_DEADLINE_S):
        yield


def _before_fork() -> None:
    latest = time.monotonic() + IMPORT_DEADLINE_S
    _gate.acquire(timeout=IMPORT_DEADLINE_S)
    never, last_steps, got_on_at = Flag(), -1, 0.0
    while others := _inside.keys() - {get_ident()}:
        now = time.monotonic()
        # Without imports: another thread of the app may import for its own reasons while the database hangs.
        if (reached := steps(imports=False)) != last_steps:
            last_steps, got_on_at = reached, now
        # A thread that imports inside its transaction may take as long as an import.
        patience_s = max((max(_inside.get(other) or [0.0]) for other in others), default=0.0)
        if now >= min(latest, got_on_at + patience_s):
            break
        never.wait(0.001)  # and not `time.sleep`, which gevent replaces
    if not _inside:
        for holder in list(_holders):
            with suppress(Exception):
                holder.let_go()


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):  # the deadline passed, so the lock is not ours
        _gate.release()


def _after_fork_in_child() -> None:
    # New locks: the thread that held the old ones does not exist in the child.
    global _gate, _one_import
    _gate, _one_import = RLock(), RLock()
    for other in _inside.keys() - {get_ident()}:
        del _inside[other]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
