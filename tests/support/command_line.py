"""The command line as a user meets it: real processes, their exit codes and what they print."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.support import warm_commands

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}
ENVIRONMENT["COLUMNS"] = "300"  # rich wraps at 80 where there is no terminal


def art_patch(*arguments: str | Path, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_commands.run(
        [*map(str, arguments)], ENVIRONMENT | {"ART_PATCH_HOME": str(home)} | environment, timeout_s=120
    )


def commands_with(option: str) -> set[str]:
    """The commands of `art-patch` that have this option."""
    import typer

    from art_patch.cli.app import app

    def find(command: Any, path: tuple[str, ...]) -> set[str]:
        found = {" ".join(path)} if any(each.name == option for each in command.params) else set[str]()
        return found.union(*(find(each, (*path, name)) for name, each in getattr(command, "commands", {}).items()))

    return find(typer.main.get_command(app), ())


def says(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on stderr, beside its log, that holds the words, nothing that looks like a traceback, this exit code."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.strip().splitlines() if not _LOG_LINE.match(line))
    assert line.startswith("art-patch: ")
    for word in words:
        assert word in line


class Serving:
    """`art-patch serve` in a process of its own."""

    def __init__(self, base: Path, home: Path, *options: str) -> None:
        self.process = warm_commands.start(
            ["serve", "--base", str(base), "--port", "0", "--json", *options],
            ENVIRONMENT | {"ART_PATCH_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        if self.process.poll() is None:
            self.process.send_signal(how)
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, without_first_words(stderr)


_LOG_LINE = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR) \S+ \d+ [\w.]+: ")


def warned(stderr: str) -> str:
    """What a process said, of its log the messages of warnings and errors only."""
    lines = [(_LOG_LINE.match(line), line) for line in stderr.splitlines(keepends=True)]
    return "".join(line[head.end() :] if head else line for head, line in lines if not head or head[1] != "INFO")


def without_first_words(stderr: str) -> str:
    """What a process said, without what the first `serve` or `retrain` of a project tells of its data; see `warned`."""
    stderr = warned(stderr)
    lines = stderr.splitlines(keepends=True)
    begins = next((n for n, line in enumerate(lines) if ": calls of its apps are recorded with " in line), None)
    return stderr if begins is None else "".join(lines[:begins] + lines[begins + FIRST_WORDS :])


FIRST_WORDS = 4
"""Lines that the first start of a project prints."""
