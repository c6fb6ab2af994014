"""One vLLM with everything it started: started, ended, and swept up if its server was killed.

Every process of it inherits an environment variable that names the server it belongs to. The next server of the same
directory finds by it the processes whose server has ended, and kills them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from art_patch._lib.process import Child, end_of_log, guarded, is_alive, open_log, own_name

MARK = "ART_PATCH_SERVED_BY"
_LOG_BYTES = 16 << 20
_TAIL_BYTES = 64 << 10
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ", re.MULTILINE)
# With the lines below it that are set in: pydantic says there what is wrong.
_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .{1,400}(?:\n  \S.{1,400}){0,2})")


class VllmProcess:
    """A vLLM under a process group guard (`art_patch._lib.group_guard`)."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, log: Path, home: Path) -> None:
        """Starts it.

        Args:
            log: where its output goes; what an earlier one wrote is kept up to a size.
            home: directory of the server that it belongs to.
        """
        self.log = log
        _rotate(log)
        with open_log(log) as output:
            self._start = output.tell()
            variables = {**environment, MARK: mark(home)}
            self._process = Child(guarded("vLLM", command), variables, stdout=output, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        """Of the guard; also the number of the process group."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs. Once it does not, nothing of it does."""
        if self._process.poll() is None:
            return True
        self._process.kill_group()  # the guard itself may have been killed
        return False

    def terminate(self) -> None:
        """Asks it to finish what it has begun, and to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything it started, now."""
        self._process.kill_group()
        self._process.wait()
        self._process.close_pipes()

    def last_words(self) -> str:
        """Returns the errors that it wrote, the root first; the end of its log if it names none."""
        text = _PREFIX.sub("", end_of_log(self.log, _TAIL_BYTES, start=self._start))
        found = dict.fromkeys(_ERROR.findall(text))
        errors = [error for error in found if "EngineDeadError" not in error]  # what the death of the engine leads to
        return "\n".join(errors[:3] or text.splitlines()[-5:]) or "it wrote nothing"


def mark(home: Path) -> str:
    """Returns the value by which processes of this very server are known."""
    return f"{home}:{own_name()}"


def sweep(home: Path) -> int:
    """Kills what servers of this directory that are no more have left running.

    Returns:
        How many processes that were. Always 0 where there is no `/proc`.
    """
    found = 0
    # Again and again, because a process may fork while the others are being killed.
    for _ in range(20):
        orphans = [pid for pid, server in _marked(home) if not is_alive(server)]
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


def _rotate(log: Path) -> None:
    with suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
