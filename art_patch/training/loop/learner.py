"""The LoRA's weights and their optimizer: one step, and all that must be kept to go on from it bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from art_patch.training.config import TrainConfig
from art_patch.training.loop.ranks import Ranks
from art_patch.training.loop.tensor_file import Arrays

_BETAS = (0.9, 0.95)
_WEIGHT, _RANDOM = "weight", "torch_rng"


class Learner:
    """AdamW on whatever of a model has a gradient."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        """Take the weights of a model of `load_policy`."""
        self._config = config
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()), lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay
        )

    def clip(self, ranks: Ranks) -> float:
        """Sum the gradients of all processes, scale them down to the largest norm allowed, and return what it was."""
        ranks.sum_gradients(self._weights.values())
        return float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._config.max_grad_norm))

    def step(self, number: int) -> float:
        """Move the weights by their gradients and return their norm; `number` counts the steps of a phase from 0."""
        if number == 0:
            self._optimizer.state.clear()  # moments of another loss say nothing about this one
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * min(1.0, (number + 1) / (self._config.warmup_steps + 1))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(torch.nn.utils.get_total_norm([weight.detach() for weight in self._weights.values()]))

    def arrays(self) -> Arrays:
        """Return weights, moments, step counts and the state of torch's random numbers."""
        tensors = {f"{_WEIGHT} {name}": weight.detach() for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            tensors |= {f"{slot} {name}": value for slot, value in self._optimizer.state[weight].items()}
        tensors[_RANDOM] = torch.get_rng_state()
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}

    def restore(self, arrays: Arrays) -> None:
        """Be as `arrays` was taken."""
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
                # AdamW counts its steps on the CPU
                self._optimizer.state[weight][slot] = tensor.to(weight.device) if tensor.dim() else tensor
