"""Processes: which one this is, whether another one still lives, and children that end with this one.

Identity: a process is known by the boot of its machine, its table of processes (PID namespace), its id and its start
time. An id alone is used again, after a reboot or by another process, and means something else in another container.
No clock is compared. Without /proc nothing is known of other processes, and `lives` answers `None`.

Children: a `Child` leads a session and a process group of its own and reads its standard input from a pipe that only
this process holds. It therefore learns of our end, however we ended, by the end of its input.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from art_patch._lib import group_guard
from art_patch._lib.ids import new_id
from art_patch._lib.private_files import private

_PROC = Path("/proc")
_ENDED = ("Z", "X")
"""States of a process that has ended; its entry stays in /proc until its parent has read the exit code."""

_mine: set[str] = set()
"""Ids under which this process owns something now."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, described so that another one on its machine can tell whether it still lives.

    Attributes:
        id: uuid7 of this holding; a process that takes the lease again gets another one.
        host: name of its machine, shown to people and never compared.
        pid: process id, as its own PID namespace counts.
        boot: boot id and PID namespace; `None` without /proc.
        started: start time in clock ticks since that boot; `None` without /proc.
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
    """This process as an owner, under a new id, until the block ends."""
    pid = os.getpid()
    owner = Owner(new_id(), socket.gethostname(), pid, _boot(proc), started_at(pid, proc))
    _mine.add(owner.id)
    try:
        yield owner
    finally:
        _mine.discard(owner.id)


def lives(owner: Owner, *, proc: Path = _PROC) -> bool | None:
    """Whether the owner still holds what it took; `None` if that cannot be known from this machine or container."""
    if owner.boot is None or owner.started is None or owner.boot != _boot(proc):
        return None
    if owner.pid == os.getpid() and owner.started == started_at(owner.pid, proc):
        # The process is this one. An id that is not ours any more belongs to a lease that could not be given back,
        # because the store did not answer at that moment.
        return owner.id in _mine
    return started_at(owner.pid, proc) == owner.started


def own_name() -> str:
    """`PID-START`: names this process, and no later one that gets its id, in file names and environment variables."""
    return _name_of(os.getpid())


def is_alive(name: str) -> bool:
    """Whether the process of this machine that `own_name` named still runs; `True` for any id without /proc."""
    pid = name.partition("-")[0]
    return pid.isdigit() and _name_of(int(pid)) == name


def _name_of(pid: int) -> str:
    return f"{pid}-{started_at(pid) or ''}"


def started_at(pid: int, proc: Path = _PROC) -> str | None:
    """When a process began, in clock ticks since the boot; `None` if it has ended or there is no /proc."""
    try:
        # The second field is the program's name in brackets. It may hold spaces and brackets itself, so the fields are
        # counted from the last bracket on: the state is the first of them, the start time the twentieth.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in _ENDED else fields[19]


def _boot(proc: Path) -> str | None:
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        # All containers of a machine show its boot id, but each has a table of processes of its own.
        return f"{boot} {os.readlink(proc / 'self/ns/pid')}"
    except OSError:
        return None


class Child(subprocess.Popen[str]):
    """A process in a session of its own, spoken to in lines of UTF-8 text.

    The session keeps Ctrl-C in the terminal from the child, so that this process ends it in order. The child leads the
    session's process group, and with the group everything that it started can be ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
        errors: str = "replace",
        kernel_ends_it: bool = False,
    ) -> None:
        """Start it.

        Args:
            command: the program and its arguments.
            environment: all its variables; ours are not added.
            stdout: a pipe to this process unless given.
            stderr: thrown away unless given.
            errors: how bytes that are not UTF-8 are decoded.
            kernel_ends_it: on Linux the kernel sends the child SIGTERM when the thread that started it ends, for
                programs that do not watch their input. It takes a fork hook, which can deadlock beside other threads,
                so no process of an app uses it.
        """
        super().__init__(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors=errors,
            bufsize=1,  # a line that is written goes out at once
            start_new_session=True,
            preexec_fn=_ask_for_sigterm if kernel_ends_it and sys.platform == "linux" else None,
        )

    def stop(self, grace_s: float) -> None:
        """End it by SIGTERM, and its whole group by SIGKILL if it takes longer than `grace_s`; can be called twice."""
        if self.poll() is None:
            self.terminate()
        try:
            self.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill_group()
            self.wait()
        # Only now: a thread of ours that still reads holds the pipe's lock until the child's side is closed.
        self.close_pipes()

    def kill_group(self) -> None:
        """End it and everything that it started, now. Works as well when it has ended and left others behind."""
        # macOS refuses (PermissionError) where all that is left of the group are zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close_pipes(self) -> None:
        """Close our ends of its pipes."""
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with suppress(OSError):  # the child did not read the last lines
                    pipe.close()


def guarded(name: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` under `group_guard`; `name` stands for it in the log."""
    # -I -S: no site packages and no variables of the user, so that the guard starts in milliseconds and imports nothing
    # but the standard library.
    return [sys.executable, "-I", "-S", group_guard.__file__, name, *command]


def open_log(log: Path) -> IO[bytes]:
    """Open a log to append to, readable for this user only."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(log, "ab", opener=private)


def end_of_log(log: Path, most_bytes: int, *, start: int = 0) -> str:
    """Return the last `most_bytes` of a log, nothing of it from before `start`."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read().decode(errors="replace").strip()


def when_parent_ends(act: Callable[[], object]) -> None:
    """In a `Child` that does not read its standard input: call `act` in a thread once its parent has ended."""

    def watch() -> None:
        with suppress(OSError):
            # Only the parent has the other end (it is close-on-exec there), so the kernel closes it when the parent
            # ends, in whatever way.
            while os.read(0, 1 << 16):
                pass
        act()

    threading.Thread(target=watch, name="art-patch-parent", daemon=True).start()


def _ask_for_sigterm() -> None:
    group_guard.die_with_parent(signal.SIGTERM)
