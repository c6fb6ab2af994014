"""A process of ours below a script of the user's, which speaks JSON lines and never outlives the script.

The script's process holds the child's standard input. When that closes, in whatever way the script ended, the child
ends itself (`end_with_parent`); a kernel's signal for it would need a fork hook, which is not safe beside threads.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from art_patch._lib import process

_TAIL_BYTES = 2_000


class Child:
    """One such process; Python modules only."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it.

        Args:
            module: what `python -m` runs; it calls `end_with_parent` or reads its input to the end.
            arguments: of the module.
            environment: besides our own.
            log: takes what it says on stderr.
        """
        self.log = log
        # -P: files beside the script must not stand in for modules of the same name
        command = [sys.executable, "-P", "-m", module, *arguments]
        with process.open_log(log) as stderr:
            self._process = process.Child(command, {**os.environ, **environment}, stderr=stderr)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Write a line.

        Raises:
            OSError: it is gone.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")

    def read(self) -> dict[str, Any] | None:
        """Wait for a line that is a JSON object, and return it; `None` when there will be none any more."""
        assert self._process.stdout is not None
        with suppress(ValueError):  # our own side was closed by `stop`
            for line in self._process.stdout:
                with suppress(ValueError):
                    found: Any = json.loads(line)
                    if isinstance(found, dict):
                        return cast("dict[str, Any]", found)
        return None

    def last_words(self) -> str:
        """Return the end of its log."""
        return "\n".join(process.end_of_log(self.log, _TAIL_BYTES).splitlines()[-5:]) or "it said nothing"

    def stop(self, grace_s: float = 15.0) -> None:
        """End it by SIGTERM, and by SIGKILL if it takes longer; can be called twice."""
        self._process.stop(grace_s)


def end_with_parent() -> None:
    """In the child: be asked to end (SIGTERM) when standard input closes. For processes that do not read it."""
    process.when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
