"""What an update that was killed left behind: a copy of the tokens it was learning from. Loads no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock, Timeout


def forget_unfinished(directory: Path) -> bool:
    """Delete such copies; false if a cycle is at work, whose own goes when it ends.

    The next cycle begins that update anew, with what is in the store then.

    Args:
        directory: the project's.
    """
    jobs = directory / "training"
    if not jobs.exists():
        return True
    try:
        with FileLock(directory / "cycle.lock", timeout=0):
            shutil.rmtree(jobs)
    except Timeout:
        return False
    return True
