"""Starts a cycle as the command line would: as a process of its own, which goes on if this server ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from art_patch import insights, pipeline, store
from art_patch._lib.process import lives
from art_patch.errors import Busy
from art_patch.settings import Settings, variable_of
from art_patch.web.acting import Acting, Done
from art_patch.web.projects import Project

_CYCLE = "cycle"  # name of the lease that a cycle holds

# By the project's directory: the newest process, and when it was started.
_started: dict[Path, tuple[subprocess.Popen[bytes], float]] = {}
_lock = threading.Lock()


def start(acting: Acting) -> Done:
    """Start `art-patch retrain`; its output goes to the log of the scheduled job.

    Raises `Busy` if a cycle runs, as far as one can tell here; the command itself makes sure of it.
    """
    project, settings = acting.project, acting.project.settings
    name = acting.person
    with _lock:
        if (why := why_not(project)) is not None:
            raise Busy(why)
        known = {"project": settings.project, "home": str(settings.directory.parent.absolute())}
        if settings.store is not None:
            known["store"] = store.absolute_url(settings.store)
        variables = {variable_of(field): value for field, value in known.items()}
        with open(settings.directory / insights.JOB_LOG, "ab", opener=_private) as log:
            process = subprocess.Popen(
                [*command_of(settings), f"--who={name}"],
                env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        _started[settings.directory] = process, time.time()
    # So that the process leaves no zombie behind.
    threading.Thread(target=process.wait, name="art_patch-web-cycle", daemon=True).start()
    return Done(f"a cycle was started as process {process.pid}; this page follows it", "cycles")


def command_of(settings: Settings) -> list[str]:
    """Return the command that runs a cycle of this project."""
    return [sys.executable, "-P", "-m", "art_patch", "retrain", "--project", settings.project]


def why_not(project: Project) -> str | None:
    """Return why no cycle can be started now; `None` if one can."""
    if is_starting(project) or pipeline.read_running(project.settings.directory) is not None:
        return "a cycle is running; start another one when it is done"
    owner = project.store.leases.read(_CYCLE).owner
    if owner is not None and lives(owner):
        return f"a cycle is running on this store ({owner}); start another one when it is done"
    return None


def is_starting(project: Project) -> bool:
    """Whether a process that this server has started still runs, and has not noted its end yet."""
    process, since = _started.get(project.settings.directory, (None, 0.0))
    if process is None or process.poll() is not None:
        return False
    last = pipeline.last_retrain(project.settings.directory)
    return last is None or last["ended_at"] < since


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
