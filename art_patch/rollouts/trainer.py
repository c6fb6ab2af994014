"""A script's side of the trainer's process: one update at a time, while the script goes on asking its model.

The process is started by the first update and stays. A script that is cancelled in an update ends the process, which
loses that update and nothing else; the next update starts another.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from art_patch import errors
from art_patch.errors import TrainingError
from art_patch.rollouts.child import Child
from art_patch.training import TrainConfig

Progress = Callable[[int, int, str], None]
"""Optimizer steps done, their total, and a word on it; called from another thread."""


class Trainer:
    """The trainer of one project."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """Start nothing yet.

        Args:
            environment: which says the project.
            log: takes what its process says.
        """
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
        """Train on groups of the store, evaluate on others, and return what came of it, as `UpdateByHand`.

        Raises:
            ArtPatchError: what the update raised in its process.
            TrainingError: the process died.
        """
        request = {"groups": list(groups), "evaluation": list(evaluation), "config": asdict(config), "who": who}
        try:
            return await asyncio.to_thread(self._update, request, progress)
        except asyncio.CancelledError:
            self.close()  # which ends the thread, too
            raise

    def _update(self, request: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
        with self._one:
            if self._child is None or not self._child.alive():
                self._child = Child("art_patch.rollouts.trainer_process", (), self._environment, self._log)
            child = self._child
            try:
                child.send(request)
            except OSError:
                raise self._died(child) from None
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
            child.stop(grace_s=0.0 if self._one.locked() else 5.0)
