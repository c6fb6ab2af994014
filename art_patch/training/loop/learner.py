"""Optimizes the LoRA's weights, and keeps weights, optimizer and progress of an update in checkpoints.

A checkpoint holds the LoRA's weights, the optimizer's moments and step counts, the state of torch's random number
generator, the number of steps done, and the metrics of each step. An update that continues from a checkpoint makes,
bit for bit, the policy that it would have made without the interruption. A new checkpoint replaces the old one
atomically, so a valid checkpoint always remains after a crash.
"""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from art_patch.training.config import TrainConfig
from art_patch.training.loop.job import Arrays, file_content, read_file, write_file
from art_patch.training.loop.processes import Ranks

_BETAS = (0.9, 0.95)
_WEIGHT, _RANDOM = "weight", "torch_rng"
_FILE = "checkpoint.safetensors"


class Learner:
    """The AdamW optimizer of an update, for the trainable weights of a model of `load_policy`: those of the LoRA."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self._config = config
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()), lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay
        )

    def clip(self, ranks: Ranks) -> float:
        """Sums the gradients of all processes, scales them to `max_grad_norm` at most, and returns the norm before."""
        ranks.sum_gradients(self._weights.values())
        return float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._config.max_grad_norm))

    def step(self, number: int) -> float:
        """Lets AdamW change the weights by their gradients, clears the gradients, and returns the norm of the weights.

        `number` is the step's number within its phase, from 0. At 0 the optimizer's moments are cleared. The first
        `warmup_steps` steps of a phase use a smaller learning rate.
        """
        if number == 0:
            self._optimizer.state.clear()  # moments of another phase's loss say nothing about this one
        # Warm-up of each phase: with the moments cleared, Adam's first steps are of full size whatever the gradient.
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * min(1.0, (number + 1) / (self._config.warmup_steps + 1))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.nn.utils.get_total_norm([weight.detach() for weight in self._weights.values()]))

    def arrays(self) -> Arrays:
        """Returns the state for a checkpoint: weights, AdamW's moments and step counts, torch's random state."""
        tensors = {f"{_WEIGHT} {name}": weight.detach() for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            tensors |= {f"{slot} {name}": value for slot, value in self._optimizer.state[weight].items()}
        # Of the CPU alone; dropout seeds itself at each step, so a GPU's random numbers need not be kept.
        tensors[_RANDOM] = torch.get_rng_state()
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def restore(self, arrays: Arrays) -> None:
        """Restores the state that `arrays()` returned; an empty mapping (no checkpoint yet) changes nothing."""
        for key, array in arrays.items():
            slot, _, name = key.partition(" ")
            tensor = torch.from_numpy(array)
            if slot == _RANDOM:
                torch.set_rng_state(tensor)
            elif slot == _WEIGHT:
                with torch.no_grad():
                    self._weights[name].copy_(tensor)
            else:
                weight = self._weights[name]
                # AdamW counts its steps on the CPU, in a tensor without axes; its moments lie beside the weights.
                self._optimizer.state[weight][slot] = tensor.to(weight.device) if tensor.dim() else tensor


@dataclass(slots=True)
class TrainState:
    """Progress of an update, as a checkpoint stores it; the checkpoint uses the same field names."""

    done: int = 0  # number of optimizer steps of the plan that were made
    stopped: str | None = None  # why the update ends before the end of its plan; `None` if it does not
    gap_nats: float | None = None  # see `StartScores`
    why_not_shared: str | None = None  # why the model computes token sequences one by one, see `Scorer.why_apart`
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # metrics of each step that was made


def read_train_state(directory: Path) -> tuple[TrainState, Arrays]:
    """Reads the checkpoint in a job directory: the progress of the update, and the arrays for `Learner.restore`.

    Without a checkpoint it returns the state of a new update and no arrays. Raises `TrainingError` if the checkpoint is
    damaged or cannot be read.
    """
    found = read_file(directory / _FILE)
    return (TrainState(), {}) if found is None else (TrainState(**found[1]), found[0])


class CheckpointWriter:
    """Writes an update's checkpoints, due `every_s` seconds after the last and after every `every_steps` steps."""

    def __init__(self, directory: Path, every_s: float, every_steps: int | None = None) -> None:
        self._path, self._every_s, self._every_steps = directory / _FILE, every_s, every_steps
        self._kept_at = time.monotonic()

    def keep(self, train_state: TrainState, learner: Learner, *, now: bool) -> None:
        """Writes a checkpoint if one is due by time or by number of steps, or if `now`; call it after every step.

        Raises `TrainingError` if the disk is full or not writable. The previous checkpoint stays valid.
        """
        counted = self._every_steps is not None and train_state.done % self._every_steps == 0
        if now or counted or time.monotonic() - self._kept_at >= self._every_s:
            write_file(self._path, file_content(learner.arrays(), asdict(train_state)))
            self._kept_at = time.monotonic()
