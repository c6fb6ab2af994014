"""Dropout of a LoRA, as peft has it: on its input, in the forward and backward of optimizer steps and nowhere else.

The masks of a step are drawn from seed, step and process alone, so an update that was killed goes on with those that it
would have had. Dropout that the base model itself would do stays off.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from art_patch.training.config import TrainConfig
from art_patch.training.loop.ranks import Ranks


def dropout_off(model: Any) -> None:
    """Let every LoRA of `model` compute exactly."""
    for layer in _layers(model):
        layer.eval()


@contextmanager
def dropout_on(model: Any, config: TrainConfig, step: int, ranks: Ranks) -> Generator[None]:
    """Drop what goes into the LoRA meanwhile, if the config says so; without it nothing is changed or drawn.

    Args:
        model: with a LoRA that was made with the config's dropout.
        config: how much, and the seed.
        step: of the plan, from 0.
        ranks: of this process.
    """
    if not config.lora_dropout:
        yield
        return
    # For the GPU too, whose random numbers no checkpoint keeps.
    torch.manual_seed(random.Random(f"{config.seed} dropout {step} {ranks.rank}").getrandbits(63))
    for layer in _layers(model):
        layer.train()
    try:
        yield
    finally:
        dropout_off(model)


def _layers(model: Any) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [
        dropout
        for module in model.modules()
        if isinstance(module, LoraLayer)
        for dropout in module.lora_dropout.values()  # type: ignore[reportUnknownMemberType]
    ]
