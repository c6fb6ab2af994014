"""One vLLM with everything it started: begun, ended, and swept up after an end that nobody planned.

Every process of it carries a variable that names the server it belongs to. A server that was killed leaves processes
whose variable names a process that is no more: the next server of that directory finds them by it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from art_patch._lib.private_files import private

MARK = "ART_PATCH_SERVED_BY"
_KEEPER = Path(__file__).with_name("keeper.py")
_LOG_BYTES = 16 << 20
_TAIL_BYTES = 64 << 10
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ", re.MULTILINE)
# With the lines below it that are set in: pydantic says there what is wrong.
_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .{1,400}(?:\n  \S.{1,400}){0,2})")


class VllmProcess:
    """A keeper and the vLLM below it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, log: Path, home: Path) -> None:
        """Starts it.

        Args:
            command: of vLLM.
            environment: of vLLM.
            log: where its output goes; what an earlier one wrote is kept up to a size.
            home: directory of the server that it belongs to.
        """
        self.log = log
        _rotate(log)
        with open(log, "ab", opener=private) as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), *command],
                env={**environment, MARK: mark(home)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the keeper; also the number of the process group."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs. Once it does not, nothing of it does."""
        if self._process.poll() is None:
            return True
        self._kill_group()  # the keeper itself may have been killed
        return False

    def terminate(self) -> None:
        """Asks it to finish what it has begun, and to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything it started, now."""
        self._kill_group()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def last_words(self) -> str:
        """Returns the errors that it wrote, the root first; the end of its log if it names none."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._start, size - _TAIL_BYTES))
            text = _PREFIX.sub("", file.read().decode(errors="replace"))
        found = dict.fromkeys(_ERROR.findall(text))
        errors = [error for error in found if "EngineDeadError" not in error]  # what the death of the engine leads to
        return "\n".join(errors[:3] or text.strip().splitlines()[-5:]) or "it wrote nothing"

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def mark(home: Path) -> str:
    """Returns the value by which processes of this very server are known."""
    return f"{home}:{owner()}"


def owner() -> str:
    """Returns what names this process and no other that ever runs under its number."""
    return f"{os.getpid()}-{_started_at(os.getpid())}"


def lives(owner: str) -> bool:
    """Whether the process that `owner` named is still there."""
    pid, _, started = owner.partition("-")
    return pid.isdigit() and _started_at(int(pid)) == started


def sweep(home: Path) -> int:
    """Kills what servers of this directory that are no more have left running.

    Returns:
        How many processes that were. Always 0 where there is no `/proc`.
    """
    found = 0
    for _ in range(20):
        orphans = [pid for pid, server in _marked(home) if not lives(server)]
        if not orphans:
            break
        found = max(found, len(orphans))
        for pid in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return found


def marked(home: Path) -> list[int]:
    """Returns the processes that belong to any server of this directory."""
    return [pid for pid, _ in _marked(home)]


def _marked(home: Path) -> list[tuple[int, str]]:
    prefix = f"{MARK}={home}:".encode()
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        found += [(int(entry.name), v[len(prefix) :].decode()) for v in variables if v.startswith(prefix)]
    return found


def _started_at(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if there is none, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _rotate(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
