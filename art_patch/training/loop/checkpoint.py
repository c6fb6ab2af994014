"""How far an update is, in memory and on disk: to go on from it is to never have stopped.

The file holds the LoRA's weights, the optimizer's moments and step counts, torch's random numbers, how many steps of
the plan are done, and what was seen in them. It is replaced whole, so there is always one that can be gone on from.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from art_patch.training.loop import tensor_file
from art_patch.training.loop.learner import Learner

_FILE = "checkpoint.safetensors"


@dataclass(slots=True)
class TrainState:
    """How far an update is.

    Attributes:
        done: steps of the plan that were made.
        stopped: why no more will be made.
        gap_nats: of the start, see `StartScores`.
        why_not_shared: of the model, see `Scorer`.
        history: metrics of each step.
    """

    done: int = 0
    stopped: str | None = None
    gap_nats: float | None = None
    why_not_shared: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def read_train_state(directory: Path) -> tuple[TrainState, tensor_file.Arrays]:
    """Return how far the update of a job directory is, and what its learner was then; a new one has made no step.

    Raises:
        TrainingError: the checkpoint was damaged by something else.
    """
    found = tensor_file.read(directory / _FILE)
    return (TrainState(), {}) if found is None else (TrainState(**found[1]), found[0])


class CheckpointWriter:
    """Writes checkpoints now and then."""

    def __init__(self, directory: Path, every_s: float, every_steps: int | None = None) -> None:
        """Write to a job directory.

        Args:
            directory: the job's.
            every_s: least time between two that are not asked for.
            every_steps: of the plan, after which there is one in any case.
        """
        self._path = directory / _FILE
        self._every_s = every_s
        self._every_steps = every_steps
        self._kept_at = time.monotonic()

    def keep(self, train_state: TrainState, learner: Learner, *, now: bool) -> None:
        """Write a checkpoint if it is time, or asked for.

        Raises:
            TrainingError: the disk is full or cannot be written; the checkpoint before is whole.
        """
        counted = self._every_steps is not None and train_state.done % self._every_steps == 0
        if now or counted or time.monotonic() - self._kept_at >= self._every_s:
            tensor_file.write(self._path, tensor_file.to_bytes(learner.arrays(), asdict(train_state)))
            self._kept_at = time.monotonic()
