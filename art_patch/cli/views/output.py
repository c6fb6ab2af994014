"""How answers, progress and errors look. stdout carries the answer, stderr everything else.

Rich is imported by what draws: an answer in JSON, which scripts wait for, needs none of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from art_patch.errors import ArtPatchError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def answer(value: dict[str, Any]) -> None:
    """Print the answer as one line of JSON."""
    sys.stdout.write(json.dumps(value, default=str) + "\n")
    sys.stdout.flush()


def fail(error: ArtPatchError, *, as_json: bool) -> int:
    """Print the error in one line and return its exit code."""
    from art_patch.cli.views.safe_text import one_line

    if as_json:
        message = " ".join(str(error).split())
        answer({"error": type(error).__name__, "message": message, "exit_code": error.exit_code})
    else:
        sys.stderr.write(f"art-patch: {one_line(error)}\n")  # a server's words may be in it
    return error.exit_code


def stdout() -> Console:
    """Console for answers."""
    from rich.console import Console

    return Console(highlight=False)


def stderr() -> Console:
    """Console for progress."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Bars:
    """Progress of a cycle: one bar a stage. Where stderr is no terminal, one line when a stage ends."""

    def __init__(self, progress: Progress | None) -> None:
        """Draw on `progress`; `None` prints nothing."""
        self._progress = progress
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show how far a stage is."""
        if self._progress is None:
            return
        if stage not in self._tasks or done < self._tasks[stage][1]:
            self._tasks[stage] = (self._progress.add_task(stage, total=total, note=note), done)
        task, _ = self._tasks[stage]
        self._tasks[stage] = (task, done)
        self._progress.update(task, completed=done, total=total, note=note)
        if done >= total and not self._progress.console.is_terminal:
            self._progress.console.print(f"{stage}: {done}/{total} {note}".rstrip())

    def print(self, text: str) -> None:
        """Print a line that stays, above the bars."""
        if self._progress is not None:
            self._progress.console.print(text)

    def clear(self) -> None:
        """Remove the bars, before the same stages run again."""
        if self._progress is not None:
            for task, _ in self._tasks.values():
                self._progress.remove_task(task)
        self._tasks.clear()


@contextmanager
def bars(*, quiet: bool) -> Generator[Bars]:
    """Show progress on stderr while the block runs: a terminal gets bars; a log file lines, or nothing if `quiet`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = stderr()
    if quiet and not console.is_terminal:
        yield Bars(None)
        return
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield Bars(progress)


def ago(seconds: float) -> str:
    """Return a duration in the largest unit that fits: `42 s`, `3 min`, `5 h`, `2 d`."""
    for limit, unit, size in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def seconds(value: float) -> str:
    """Return `40 ms`, `1.3 s`, `2 min`."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"
