"""Prints results, progress and errors.

A terminal must never execute recorded text, which strangers decide who talk to an agent. So both consoles print what
could control a terminal as its escape sequence in Python. Recorded texts are passed to rich as `Text`, in which
brackets are not markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

from art_patch._lib import words
from art_patch._lib.lazy import TYPE_CHECKING, lazily
from art_patch._lib.words import one_line, sentences, visible
from art_patch.errors import ArtPatchError, ConfigError
from art_patch.types import UpstreamChange

# Rich is imported when something is drawn: an answer in JSON, which scripts wait for, needs none of it.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.markup import escape as escape
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text
else:
    __getattr__ = lazily()  # other modules write `output.Text`

INTERRUPTED = 130  # 128 + SIGINT, as shells have it

# Commands say `output.ago(...)`: how something is said is one place for them.
ago, counted, listed = words.ago, words.counted, words.listed
seconds, share, usd = words.seconds, words.share, words.usd


def answer(value: dict[str, Any], stream: TextIO | None = None) -> None:
    """Print a command's result as one line of JSON, on stdout if no other stream is given."""
    try:
        line = json.dumps(value, default=str, allow_nan=False)
    except ValueError:  # JSON has no word for what is no finite number
        line = json.dumps(json.loads(json.dumps(value, default=str), parse_constant=lambda _: None))
    # Flushed, because a server that started goes on, and scripts wait for this line.
    print(line, file=stream, flush=True)


def say(text: str, **style: Any) -> None:
    """Print a line without wrapping, so that paths in it can be copied, and without reading its brackets as markup."""
    stdout().print(text, markup=False, soft_wrap=True, **style)


def fail(error: ArtPatchError, *, as_json: bool) -> int:
    """Print the error in one line, or as JSON with `as_json`, and return its exit code."""
    if as_json:
        # JSON escapes control characters itself.
        message = " ".join(str(error).split())
        answer({"error": type(error).__name__, "message": message, "exit_code": error.exit_code})
    else:
        sys.stderr.write(f"art-patch: {one_line(error)}\n")  # the message may quote a server
    return error.exit_code


def interrupted() -> int:
    """Print that the command was interrupted, and return its exit code."""
    sys.stderr.write("art-patch: interrupted; what was recorded and published is kept, run it again to go on\n")
    # If the signal came inside an `exec`, as in the import of a library, CPython remembers it and ends a `python -m` by
    # SIGINT instead of by our exit code, until another `exec` has ended well.
    exec("")
    return INTERRUPTED


def confirmed(question: str, *, yes: bool) -> bool:
    """Return whether data may be deleted: the option `yes` was given, or the user at the terminal agrees."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError("this deletes data and nobody can be asked here; add --yes, or --dry-run to only look")
    # On stderr: stdout is for the answer, and a pipe would hide the question.
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def cell(text: object, style: str = "") -> Text:
    """Return recorded text for a cell of a table: on one line, and with its brackets not read as markup."""
    from rich.text import Text

    return Text(one_line(text), style=style)


def stdout() -> Console:
    """Return the console for results, on stdout."""
    return _console()


def stderr() -> Console:
    """Return the console for progress and errors, on stderr."""
    return _console(on_stderr=True)


def _console(*, on_stderr: bool = False) -> Console:
    from rich.console import Console
    from rich.errors import MarkupError
    from rich.segment import Segment
    from rich.text import Text

    class Safe(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                # A link is an escape sequence of its own; brackets in a text may have asked for it.
                plain = style.update_link(None) if style and style.link else style
                yield Segment(text if control else visible(text), plain, control)

        def render_str(self, text: str, **how: Any) -> Text:
            try:
                return super().render_str(text, **how)
            except MarkupError:  # brackets of a text that was not meant as markup
                return Text(text)

    return Safe(highlight=False, stderr=on_stderr)


def table(
    *columns: str,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    padding: tuple[int, int] | tuple[int, int, int, int] = (0, 2),
) -> Table:
    """Return a table without lines. Columns in `right` are aligned right; the text of those in `whole` never wraps."""
    from rich.table import Table

    made = Table(box=None, padding=padding, header_style="dim")
    for name in columns:
        justify = "right" if name in right else "left"
        made.add_column(name, justify=justify, no_wrap=name in whole, overflow="fold")
    return made


def grid(*styles: str, gap: int = 2) -> Table:
    """Return a table without header, with one column for each style; an empty style is the console's default."""
    from rich.table import Table

    made = Table.grid(padding=(0, gap))
    for style in styles:
        made.add_column(style=style, overflow="fold")
    return made


def print_below(console: Console, *lines: str) -> None:
    """Print details below a line of a list: dim, indented where they wrap, too, and without reading markup."""
    made = grid("", "dim", gap=0)
    for line in lines:
        made.add_row("  ", cell(line))
    console.print(made)


def print_reason(console: Console, head: str, reason: str) -> None:
    """Print a decision with its verdict, the first part of its reason, and below, a line each, what it rests on.

    `head` may have markup, the reason has none. `--json` and `art-patch history` have the reason as it was noted.
    """
    from rich.markup import escape

    verdict, *facts = sentences(reason) or [""]
    console.print(f"{head}{': ' if head else ''}{escape(verdict)}", soft_wrap=True)
    print_below(console, *facts)


class Bars:
    """Shows the progress of a cycle: a bar for each stage, or, if stderr is no terminal, a line when a stage ends."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._tasks: dict[str, tuple[Any, int]] = {}
        self._ended: set[str] = set()

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` items of a stage are finished."""
        if self._progress is None:
            return
        from rich.markup import escape

        note = escape(one_line(note))
        task, before = self._tasks.get(stage, (None, 0))
        # A stage that begins again, as in the next cycle of a demo, gets a bar of its own.
        if task is None or done < before:
            task = self._progress.add_task(stage, total=total, note=note)
            self._ended.discard(stage)
        self._tasks[stage] = (task, done)
        self._progress.update(task, completed=done, total=total, note=note)
        if done < total:
            self._ended.discard(stage)
        elif stage not in self._ended:
            # Once: a stage may tell more, such as rows of a last item, when all items were looked at.
            self._ended.add(stage)
            if not self._progress.console.is_terminal:
                self._progress.console.print(f"{stage}: {done}/{total} {note}".rstrip())

    def counts(self, stage: str) -> Callable[[int, int], None]:
        """Return a function `(done, total)` that shows progress of `stage`, for code that reports only two numbers."""
        return lambda done, total: self(stage, done, total)

    def print(self, text: str) -> None:
        """Print a line above the bars; later updates of the bars do not remove it."""
        if self._progress is not None:
            self._progress.console.print(text)

    def clear(self) -> None:
        """Remove all bars, so that the next cycle's stages get new ones."""
        if self._progress is not None:
            for task, _ in self._tasks.values():
                self._progress.remove_task(task)
        self._tasks.clear()
        self._ended.clear()


@contextmanager
def bars(*, quiet: bool) -> Generator[Bars]:
    """Show progress on stderr: as bars on a terminal, even if `quiet`; elsewhere as lines, or not at all if `quiet`."""
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


def changed(change: UpstreamChange) -> str:
    """Say which model of upstream's was replaced by which, and when."""
    when = f"{datetime.fromtimestamp(change.at):%Y-%m-%d %H:%M}"
    return one_line(f"upstream's model changed at {when}: {change.before} -> {change.after}")
