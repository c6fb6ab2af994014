"""Bars on stderr while rollouts run: one display for all that run at once, whatever gathers them.

Nothing is shown where stderr is no terminal (a notebook is one): a job's log is for what ends, not for what goes on.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_shown: list[Any] = []
"""The display and how many bars it has, while there is one."""


class Bar:
    """One bar; without a display it does nothing."""

    def __init__(self, display: Any, task: Any) -> None:
        """Hold the task of a display."""
        self._display = display
        self._task = task

    def advance(self, by: int, note: str) -> None:
        """Go on by so much, and say this beside it."""
        if self._display is not None:
            self._display.update(self._task, advance=by, note=note)

    def at(self, done: int, total: int, note: str) -> None:
        """Stand at so much of so much, and say this beside it."""
        if self._display is not None:
            self._display.update(self._task, completed=done, total=total, note=note)


@contextmanager
def bar(description: str | None, total: int) -> Generator[Bar]:
    """Show a bar until the block ends; `None` shows none."""
    display = None if description is None else _begin()
    if display is None:
        yield Bar(None, None)
        return
    task = display.add_task(description, total=total, note="")
    try:
        yield Bar(display, task)
    finally:
        display.stop_task(task)
        _end(display)


def _begin() -> Any:
    if not _shown:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if not (console.is_terminal or console.is_jupyter):
            return None
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        display = Progress(*columns, TextColumn("{task.fields[note]}"), console=console)
        display.start()
        _shown.append([display, 0])
    _shown[0][1] += 1
    return _shown[0][0]


def _end(display: Any) -> None:
    _shown[0][1] -= 1
    if not _shown[0][1]:
        _shown.clear()
        display.stop()
