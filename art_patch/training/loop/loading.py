"""The base model with a LoRA on it, ready to be trained: exact log-probabilities, the gradient on the LoRA alone."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch  # with transformers it takes seconds: import this module only to train
from torch import nn
from torch.utils.checkpoint import checkpoint

from art_patch.training.config import TrainConfig
from art_patch.training.kernels.families import target_names
from art_patch.training.kernels.lora_layers import fuse

_REFERENCE = "reference"


def load_policy(base: str, adapter: Path | None, config: TrainConfig, *, device: torch.device | None = None) -> Any:
    """Return the base model with a LoRA.

    Nothing in it is random until `dropout_on`.

    Args:
        base: model directory or hub id.
        adapter: directory of the LoRA to continue; `None` puts a new one on, which changes nothing yet.
        config: how.
        device: a GPU if there is one, unless given.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the cycle shows its own
    # peft 0.21 asks transformers 5.23 by the old name
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    device = device or default_device()
    torch.manual_seed(config.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=weights_dtype(config, device))
    if adapter is None:
        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout,
            target_modules=target_names(model), task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, lora)
    else:
        kept: Any = LoraConfig.from_pretrained(str(adapter))
        kept.lora_dropout = config.lora_dropout
        model = PeftModel.from_pretrained(model, str(adapter), config=kept, is_trainable=True)
    model.to(device)
    model.eval()
    fuse(model)
    if recomputes(config, device):
        _recompute_blocks(model)
    return model


def default_device(rank: int = 0) -> torch.device:
    """Return the GPU of a process on this machine, or the CPU."""
    return torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")


def weights_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return the precision of the base's weights."""
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"auto": auto, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def recomputes(config: TrainConfig, device: torch.device) -> bool:
    """Return whether blocks are computed again in the backward."""
    return device.type == "cuda" if config.gradient_checkpointing is None else config.gradient_checkpointing


@contextmanager
def as_reference(model: Any, adapter: Path | None) -> Generator[None]:
    """Let `model` compute as another policy meanwhile.

    Args:
        model: of `load_policy`.
        adapter: directory of that policy's LoRA; `None` is the base.
    """
    if adapter is None:
        with model.disable_adapter():
            yield
        return
    trained = model.active_adapter
    modes = [(module, module.training) for module in model.modules()]
    model.load_adapter(str(adapter), _REFERENCE)  # puts all in evaluation mode, where no block would be recomputed
    model.set_adapter(_REFERENCE)
    try:
        yield
    finally:
        model.set_adapter(trained)
        model.delete_adapter(_REFERENCE)
        for module, training in modes:
            module.training = training


def _recompute_blocks(model: nn.Module) -> None:
    """Switch gradient checkpointing on and nothing else: transformers ties it to `training`, and dropout too."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            block: Any = module
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            block.training = True  # of the block alone, not of what is in it
