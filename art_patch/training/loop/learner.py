"""The LoRA's weights and their optimizer, how far an update is, and the checkpoint that holds both.

A checkpoint has the LoRA's weights, the optimizer's moments and step counts, torch's random numbers, the number of
steps done, and the metrics of each. An update that goes on from it makes bit for bit the policy that it would have
made. The file is replaced whole, so there is always one to go on from.
"""

from __future__ import annotations

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
    """AdamW on the parameters of a model that have a gradient."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        """Takes the weights of a model of `load_policy`."""
        self._config = config
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()), lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay
        )

    def clip(self, ranks: Ranks) -> float:
        """Sums the gradients of all processes, scales them to the largest norm allowed, and returns the norm before."""
        ranks.sum_gradients(self._weights.values())
        return float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._config.max_grad_norm))

    def step(self, number: int) -> float:
        """Moves the weights by their gradients and returns their norm; `number` counts the steps of a phase from 0."""
        if number == 0:
            self._optimizer.state.clear()  # moments of another phase's loss say nothing about this one
        # Warm-up of each phase: with the moments cleared, Adam's first steps are of full size whatever the gradient.
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * min(1.0, (number + 1) / (self._config.warmup_steps + 1))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.nn.utils.get_total_norm([weight.detach() for weight in self._weights.values()]))

    def arrays(self) -> Arrays:
        """Returns weights, moments, step counts and the state of torch's random numbers."""
        tensors = {f"{_WEIGHT} {name}": weight.detach() for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            tensors |= {f"{slot} {name}": value for slot, value in self._optimizer.state[weight].items()}
        # Of the CPU alone; dropout seeds itself at each step, so a GPU's random numbers need not be kept.
        tensors[_RANDOM] = torch.get_rng_state()
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def restore(self, arrays: Arrays) -> None:
        """Restores the state that `arrays()` returned; no arrays leave a new learner as it is."""
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
    """How far an update is; the field names are those in a checkpoint.

    Attributes:
        done: Number of steps of the plan that were made.
        stopped: Why no more steps will be made; `None` if the plan goes on.
        gap_nats: The `gap_nats` of `StartScores`.
        why_not_shared: The `why_apart` of the model's `Scorer`.
        history: Metrics of each step that was made.
    """

    done: int = 0
    stopped: str | None = None
    gap_nats: float | None = None
    why_not_shared: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def read_train_state(directory: Path) -> tuple[TrainState, Arrays]:
    """Returns the state and the learner's arrays in a job directory; those of a new update if it has no checkpoint.

    Raises:
        TrainingError: Something else damaged the checkpoint.
    """
    found = read_file(directory / _FILE)
    return (TrainState(), {}) if found is None else (TrainState(**found[1]), found[0])


class CheckpointWriter:
    """Writes checkpoints into a job directory, at most every so many seconds unless asked for."""

    def __init__(self, directory: Path, every_s: float, every_steps: int | None = None) -> None:
        """Writes to `directory`, every `every_s` seconds and also after every `every_steps` steps of the plan."""
        self._path = directory / _FILE
        self._every_s = every_s
        self._every_steps = every_steps
        self._kept_at = time.monotonic()

    def keep(self, train_state: TrainState, learner: Learner, *, now: bool) -> None:
        """Writes a checkpoint if it is time, or `now`.

        Raises:
            TrainingError: The disk is full or cannot be written. The checkpoint before is whole.
        """
        counted = self._every_steps is not None and train_state.done % self._every_steps == 0
        if now or counted or time.monotonic() - self._kept_at >= self._every_s:
            write_file(self._path, file_content(learner.arrays(), asdict(train_state)))
            self._kept_at = time.monotonic()
