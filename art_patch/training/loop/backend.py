"""Who puts the LoRA on the base model: peft everywhere, or Unsloth on CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch

from art_patch.errors import ConfigError
from art_patch.training.config import TrainConfig
from art_patch.training.loop.job import TrainJob
from art_patch.training.loop.loading import load_policy


def backend_of(config: TrainConfig) -> Literal["peft", "unsloth"]:
    """Return who does it on this machine.

    Raises:
        ConfigError: Unsloth was asked for and cannot be had.
    """
    if config.backend == "peft":
        return "peft"
    installed, cuda = find_spec("unsloth") is not None, torch.cuda.is_available()
    if installed and cuda:
        return "unsloth"
    if config.backend == "unsloth":
        missing = "there is no CUDA GPU" if not cuda else "it is not installed (pip install unsloth)"
        raise ConfigError(f"backend='unsloth', but {missing}; take backend='peft', which gives the same policy")
    return "peft"


def require_machine(config: TrainConfig) -> None:
    """Refuse early what this machine cannot do; before a judge is paid, say.

    Raises:
        ConfigError: Unsloth was asked for and cannot be had, or there are fewer GPUs than processes.
    """
    backend_of(config)
    gpus = torch.cuda.device_count()
    if gpus and config.processes > gpus:
        raise ConfigError(f"processes={config.processes}, but there are {gpus} GPUs; take at most as many")


def load(job: TrainJob, device: torch.device) -> Any:
    """Return the model that an update starts with, as `load_policy` does.

    Raises:
        ConfigError: Unsloth was asked for and cannot be had.
    """
    if backend_of(job.config) == "unsloth":
        from art_patch.training.loop.unsloth_backend import load_with_unsloth

        return load_with_unsloth(job.base, job.start, job.config, device)
    return load_policy(job.base, job.start, job.config, device=device)
