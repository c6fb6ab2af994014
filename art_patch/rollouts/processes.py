"""Processes below a script: children that speak JSON lines and never outlive the script, and the trainer among them.

The script holds each child's standard input. It closes when the script ends, in whatever way, and the child then ends
itself.

Run as a module, this file is the command line as such a child: `python -m art_patch.rollouts.processes serve ...` does
what `art-patch serve` does, and ends with the script that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from art_patch import errors
from art_patch._lib import process
from art_patch.errors import TrainingError

if TYPE_CHECKING:
    from art_patch.training import TrainConfig

Progress = Callable[[int, int, str], None]
"""Optimizer steps done, their total, and a note; called from another thread."""

_TAIL_BYTES = 2_000


class Child:
    """A Python module in a process of its own."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start it.

        Args:
            module: what `python -m` runs; it must end when its standard input closes.
            arguments: command line of that module.
            environment: added to the variables of this process.
            log: file that its stderr is appended to.
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
            OSError: the process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")

    def read(self) -> dict[str, Any] | None:
        """Wait for the next line that is a JSON object, and return it; `None` at the end of its output."""
        assert self._process.stdout is not None
        with suppress(ValueError):  # `stop` closed our side of the pipe
            for line in self._process.stdout:
                with suppress(ValueError):  # a library of the child printed something else
                    found: Any = json.loads(line)
                    if isinstance(found, dict):
                        return cast("dict[str, Any]", found)
        return None

    def last_words(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(process.end_of_log(self.log, _TAIL_BYTES).splitlines()[-5:]) or "it said nothing"

    def stop(self, grace_s: float = 15.0) -> None:
        """End it by SIGTERM, and by SIGKILL if it takes longer than `grace_s`; can be called twice."""
        self._process.stop(grace_s)


class Trainer:
    """The trainer's process of one project: one update at a time, while the script goes on asking its model.

    The first update starts the process, which stays for the next ones. Cancelling an update ends the process: that
    update is lost and nothing else, and the next update starts another process.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """Start nothing yet; `environment` names the project, `log` takes the process's stderr."""
        self._environment = environment
        self._log = log
        self._child: Child | None = None
        self._one = threading.Lock()

    async def update(
        self,
        groups: Sequence[str],
        config: TrainConfig,
        *,
        who: str,
        progress: Progress,
        evaluation: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Train on groups of the store, evaluate on others, and return the fields of the update's record.

        Raises:
            ArtPatchError: the same error as the update raised in its process.
            TrainingError: the process ended before it answered.
        """
        request = {"groups": list(groups), "evaluation": list(evaluation), "config": asdict(config), "who": who}
        try:
            return await asyncio.to_thread(self._update, request, progress)
        except asyncio.CancelledError:
            # A thread cannot be cancelled. Without its process, `read` there returns and the thread ends.
            self.close()
            raise

    def _update(self, request: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        # A second update waits here, in its own thread, for the end of the first.
        with self._one:
            if self._child is None or not self._child.alive():
                self._child = Child("art_patch.rollouts.trainer_process", (), self._environment, self._log)
            child = self._child
            try:
                child.send(request)
            except OSError:
                raise self._died(child) from None
            # Any number of progress lines, then one that ends the update.
            while (answer := child.read()) is not None:
                if "done" in answer:
                    return answer["done"]
                if "failed" in answer:
                    failed = answer["failed"]
                    raise getattr(errors, failed["type"], TrainingError)(failed["message"])
                progress(*answer["progress"])
            raise self._died(child)

    def _died(self, child: Child) -> TrainingError:
        child.stop()
        return TrainingError(
            f"the trainer's process ended; nothing was published. {self._log} says: {child.last_words()}"
        )

    def close(self) -> None:
        """End its process."""
        child, self._child = self._child, None
        if child is not None:
            # An update under way would not end within any grace, and may be killed at any moment.
            child.stop(grace_s=0.0 if self._one.locked() else 5.0)


if __name__ == "__main__":
    process.when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    runpy.run_module("art_patch", run_name="__main__")
