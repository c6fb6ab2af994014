"""Notes in the project's directory how far the cycle is that runs, for people who look at it: `running.json`.

The file is gone when the cycle has ended. That of a cycle that was killed stays: whoever reads it asks whether its
process lives. Writing it never fails a cycle.
"""

import json
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from art_patch._lib.atomic_files import replacing
from art_patch._lib.process import Owner, lives, owning
from art_patch.pipeline.cycle_run import Progress
from art_patch.types import JSON

RUNNING = "running.json"
"""Name of the file."""

_EVERY_S = 0.5  # at most so often within a stage


@contextmanager
def noting(directory: Path, progress: Progress, *, who: str, began_at: float) -> Generator[Progress]:
    """Yield a progress callback that also notes each stage, and how much of it is done, while the block runs."""
    path, stages, last = directory / RUNNING, dict[str, JSON](), [0.0]
    with owning() as owner:
        facts = {"owner": asdict(owner), "who": who, "began_at": began_at, "stages": stages}

        def write() -> None:
            last[0] = time.monotonic()
            with suppress(OSError), replacing(path) as file:
                file.write(json.dumps(facts).encode())

        def report(stage: str, done: int, total: int, note: str = "") -> None:
            is_new, now = stage not in stages, time.time()
            stages[stage] = {"since": now, **stages.get(stage, {}), "done": done, "total": total, "at": now}
            if is_new or done >= total or time.monotonic() - last[0] >= _EVERY_S:
                write()
            progress(stage, done, total, note)

        write()
        try:
            yield report
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def read_running(directory: Path) -> JSON | None:
    """Return who runs a cycle since when, and its stages so far; `None` if none runs, as far as one can tell here."""
    try:
        facts: Any = json.loads((directory / RUNNING).read_text("utf-8"))
        owner = Owner(**facts.pop("owner"))
        return None if lives(owner) is False else dict(facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
