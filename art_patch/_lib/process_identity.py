"""Which process this is, and whether another one still lives. Standard library only; no clock decides anything.

A process is known by the boot of its machine, its process table, its id and the moment it began: an id that another
process got later, or after a reboot, is not the same process, and neither is one in another container. Where the
kernel does not say (no /proc), nothing is known of others, and whoever asks has to watch them instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from art_patch._lib.ids import new_id

_PROC = Path("/proc")
_ENDED = ("Z", "X")
"""States of a process that does nothing any more and only waits to be asked how it ended."""

_mine: set[str] = set()
"""Ids under which this process owns something now."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, described so that another one on its machine can tell whether it still lives.

    Attributes:
        id: uuid7 of this holding; a process that takes the lease again takes another.
        host: name of its machine, for people.
        pid: its process id.
        boot: which boot of which machine, and which of its process tables; `None` where it cannot be known.
        started: when it began, as its kernel counts; ids of processes are used again.
    """

    id: str
    host: str
    pid: int
    boot: str | None = None
    started: str | None = None

    def __str__(self) -> str:
        """For messages."""
        return f"process {self.pid} on {self.host}"


@contextmanager
def owning(*, proc: Path = _PROC) -> Generator[Owner]:
    """This process as an owner, under a new id, until the block ends.

    Args:
        proc: where the kernel tells of processes.
    """
    pid = os.getpid()
    owner = Owner(new_id(), socket.gethostname(), pid, _boot(proc), _began(pid, proc))
    _mine.add(owner.id)
    try:
        yield owner
    finally:
        _mine.discard(owner.id)


def lives(owner: Owner, *, proc: Path = _PROC) -> bool | None:
    """Whether the owner is still at it; `None` if that cannot be known from here.

    Args:
        owner: of a lease.
        proc: where the kernel tells of processes.
    """
    if owner.boot is None or owner.started is None or owner.boot != _boot(proc):
        return None
    if owner.pid == os.getpid() and owner.started == _began(owner.pid, proc):
        return owner.id in _mine  # or we could not give it back, when the store was away
    return _began(owner.pid, proc) == owner.started


def _boot(proc: Path) -> str | None:
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        # Containers share the boot and not the table of processes.
        return f"{boot} {os.readlink(proc / 'self/ns/pid')}"
    except OSError:
        return None


def _began(pid: int, proc: Path) -> str | None:
    """When a process began, in ticks since the boot; `None` if there is none."""
    try:
        # The name of the program stands in brackets, and may hold anything.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in _ENDED else fields[19]
