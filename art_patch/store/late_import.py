"""Imports that happen late, in the writer thread, are kept out of the way of forks.

A module that is half imported in another thread at the moment of a fork stays half imported in the child, its lock
held by a thread that does not exist there: whoever imports it waits for ever, the app included. So a fork waits until
such an import is over, a few tenths of a second once in a process's life.
"""

from __future__ import annotations

import os
from _thread import RLock  # not `threading`'s, which gevent replaces
from collections.abc import Generator
from contextlib import contextmanager, suppress

FORK_DEADLINE_S = 5.0
"""How long a fork may wait."""

_importing = RLock()


@contextmanager
def late_import() -> Generator[None]:
    """Import in here; forks wait."""
    with _importing:
        yield


def _before_fork() -> None:
    _importing.acquire(timeout=FORK_DEADLINE_S)


def _after_fork_in_parent() -> None:
    with suppress(RuntimeError):  # the deadline passed, so it is not ours
        _importing.release()


def _after_fork_in_child() -> None:
    global _importing
    _importing = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
