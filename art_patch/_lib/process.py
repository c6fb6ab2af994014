"""Identifies processes, tells whether another one is still alive, and starts child processes that end with this one.

Identity: a process is identified by the boot of its machine, its PID namespace, its process id and its start time. The
id alone is not enough: it is reused after a reboot or by a later process, and another container counts its own ids.
Nothing is known of processes on another machine or in another container, or without /proc.

Children: a `Child` leads its own session and process group, and its standard input is a pipe whose write end only this
process holds. When this process ends, for whatever reason, the child reads the end of its input and can end itself.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from art_patch._lib import group_guard
from art_patch._lib.atomic_files import private
from art_patch._lib.ids import new_id

_PROC = Path("/proc")
_SIGTERM_WITH_PARENT = partial(group_guard.die_with_parent, signal.SIGTERM)

# States of a process that has ended; its entry stays in /proc until its parent has read the exit code.
_ENDED = ("Z", "X")

# Ids under which this process owns something now.
_mine: set[str] = set()


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that holds something, such as a lock; other processes can tell from this record whether it is alive."""

    id: str  # uuid7 of this holding; a process that takes the same lease again gets another id
    host: str  # name of its machine, shown to people and never compared
    pid: int  # process id, as its own PID namespace counts
    boot: str | None = None  # boot id and PID namespace; `None` without /proc
    started: str | None = None  # start time in clock ticks since that boot; `None` without /proc

    def __str__(self) -> str:
        """Return the owner as `process PID on HOST`, for an error message."""
        return f"process {self.pid} on {self.host}"


@contextmanager
def owning(*, proc: Path = _PROC) -> Generator[Owner]:
    """Yield a description of this process as an owner, with a new id that is valid until the block ends."""
    pid = os.getpid()
    owner = Owner(new_id(), socket.gethostname(), pid, _boot(proc), started_at(pid, proc))
    _mine.add(owner.id)
    try:
        yield owner
    finally:
        _mine.discard(owner.id)


def lives(owner: Owner, *, proc: Path = _PROC) -> bool | None:
    """Whether the owner is alive and, if it is this process, still holds what it took; `None` if that is unknown."""
    if owner.boot is None or owner.started is None or owner.boot != _boot(proc):
        return None
    if owner.pid == os.getpid() and owner.started == started_at(owner.pid, proc):
        # The process is this one. An id that is not ours any more belongs to a lease that could not be given back,
        # because the store did not answer at that moment.
        return owner.id in _mine
    return started_at(owner.pid, proc) == owner.started


def own_name() -> str:
    """Return `PID-START`, for file names and environment variables: no later process gets the same name."""
    return _name_of(os.getpid())


def is_alive(name: str) -> bool:
    """Whether the process of this machine whose `own_name` is `name` still runs; always true without /proc."""
    pid = name.partition("-")[0]
    return pid.isdigit() and _name_of(int(pid)) == name


def _name_of(pid: int) -> str:
    return f"{pid}-{started_at(pid) or ''}"


def started_at(pid: int, proc: Path = _PROC) -> str | None:
    """Return the start time of a process in clock ticks since the boot; `None` if it has ended or there is no /proc."""
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


def carriers_of(prefix: str) -> list[tuple[int, str]]:
    """Return (process id, text after it) of all processes with a variable that begins with `prefix`."""
    found, start = list[tuple[int, str]](), prefix.encode()
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            variables = (entry / "environ").read_bytes().split(b"\0")
            found += [(int(entry.name), v.removeprefix(start).decode()) for v in variables if v.startswith(start)]
    return found


def peak_memory_mib(pid: int) -> float:
    """Return the highest resident memory that a process has used so far, in MiB (Linux)."""
    lines = (_PROC / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


class Child(subprocess.Popen[str]):
    """A child in its own session, which Ctrl-C does not reach; both exchange lines of UTF-8 text."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
        errors: str = "replace",
        kernel_ends_it: bool = False,
    ) -> None:
        """Start the child process with no other variables than `environment`.

        With `log`, the child's stderr is appended to that file. `kernel_ends_it` lets the Linux kernel send SIGTERM
        when the thread that started the child ends, for programs that do not watch their standard input. It needs a
        hook between fork and exec, which can deadlock if other threads run, so it is never used in a process of an app.
        """
        self.log = log
        with nullcontext(stderr) if log is None else open_log(log) as errors_to:
            super().__init__(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=errors_to,
                encoding="utf-8",
                errors=errors,
                bufsize=1,  # a line that is written goes out at once
                start_new_session=True,
                preexec_fn=_SIGTERM_WITH_PARENT if kernel_ends_it and sys.platform == "linux" else None,
            )

    def last_words(self) -> str:
        """Return the last five lines of the child's log."""
        assert self.log is not None
        return "\n".join(end_of_log(self.log, 2_000).splitlines()[-5:]) or "it wrote nothing"

    def stop(self, grace_s: float = 15.0) -> None:
        """Send the child SIGTERM and wait; if it runs longer than `grace_s`, kill its process group with SIGKILL."""
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
        """Kill the child and every process that it started, also if the child itself has ended already."""
        # macOS refuses (PermissionError) where all that is left of the group are zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close_pipes(self) -> None:
        """Close this process's ends of the child's input and output pipes."""
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with suppress(OSError):  # the child did not read the last lines
                    pipe.close()


def guarded(name: str, command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command` under `group_guard`, which calls it `name` in the log."""
    # -I -S: no site packages and no variables of the user, so that the guard starts in milliseconds and imports nothing
    # but the standard library.
    return [sys.executable, "-I", "-S", group_guard.__file__, name, *command]


def open_log(log: Path) -> IO[bytes]:
    """Open a log file for appending; only the user can read a new one. Its directory is created if needed."""
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(log, "ab", opener=private)


def end_of_log(log: Path, most_bytes: int, *, start: int = 0) -> str:
    """Return the last `most_bytes` bytes of a log file as text, but nothing before the offset `start`."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read().decode(errors="replace").strip()


def when_parent_ends(act: Callable[[], object]) -> None:
    """Start a thread that calls `act` when the parent process ends; for a `Child` that does not read its own input."""

    def watch() -> None:
        with suppress(OSError):
            # Only the parent has the other end (it is close-on-exec there), so the kernel closes it when the parent
            # ends, in whatever way.
            while os.read(0, 1 << 16):
                pass
        act()

    threading.Thread(target=watch, name="art-patch-parent", daemon=True).start()
