"""The base model with a LoRA on it, by Unsloth (https://unsloth.ai/docs): its kernels for CUDA, our losses and loop.

Import this only in a process of its own, before transformers. Written from Unsloth's documentation and tested on CUDA
alone (`tests/gpu/test_unsloth.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from art_patch.training.config import TrainConfig
from art_patch.training.kernels.lora_layers import dropout_off
from art_patch.training.loop.loading import recomputes, weights_dtype


def load_with_unsloth(base: str, adapter: Path | None, config: TrainConfig, device: torch.device) -> Any:
    """Return the base model with a LoRA, as `load_policy` does."""
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]  # isort: skip  # first of all
    from peft import LoraConfig, load_peft_weights, set_peft_model_state_dict

    from art_patch.training.kernels.families import target_names

    model, _ = FastLanguageModel.from_pretrained(
        model_name=base,
        max_seq_length=config.max_tokens,
        dtype=weights_dtype(config, device),
        load_in_4bit=False,
        device_map={"": device.index or 0},
    )
    kept: Any = None if adapter is None else LoraConfig.from_pretrained(str(adapter))
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora_rank if kept is None else kept.r,
        lora_alpha=config.lora_alpha if kept is None else kept.lora_alpha,
        target_modules=target_names(model) if kept is None else sorted(kept.target_modules),
        lora_dropout=config.lora_dropout,  # Unsloth's kernels for a LoRA are for 0; else it takes peft's way
        bias="none",
        use_gradient_checkpointing="unsloth" if recomputes(config, device) else False,
        random_state=config.seed,
    )
    if adapter is not None:
        set_peft_model_state_dict(model, load_peft_weights(str(adapter), device=str(device)))
    dropout_off(model)
    return model
