"""Whether an engine would take a LoRA of a base: told before a judge is paid, without loading the base's weights.

The base is built on torch's meta device from its config, `families.target_names` says which modules get a LoRA, and one
of zeros goes through the check that every published adapter passes (`serving.adapters`). Checkpoints of models that
also see name their modules otherwise than transformers does: every adapter of theirs would be refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch  # with transformers it takes seconds: import this module only before training

from art_patch.errors import AdapterRejected, ConfigError, TrainingError
from art_patch.policies import check_content, lora_key, read_base_model, resolve_model_dir, some
from art_patch.training.kernels.families import target_names

_CURE = "serve another base, one of text alone whose checkpoint transformers loads as a causal language model"


def require_servable(base: str) -> None:
    """Refuse a base that transformers cannot load for training, or whose every LoRA the engine would refuse.

    Args:
        base: model directory or hub id.

    Raises:
        ConfigError: naming the modules.
        ModelNotFound: there is no such base.
    """
    from safetensors.numpy import save
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = resolve_model_dir(base)
    checkpoint = read_base_model(directory)
    try:
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        targets = target_names(model)
    except (ImportError, ValueError, TrainingError, AttributeError, KeyError, TypeError) as error:
        # What transformers raises for a config that it does not understand is of many kinds.
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ConfigError(f"{base} cannot be trained: {why}; {_CURE}") from error
    ends = tuple(f".{target}" for target in targets)
    shapes = {name: module.weight.shape for name, module in model.named_modules() if f".{name}".endswith(ends)}
    zeros = {
        lora_key(name, side): np.zeros(shape, np.float32)
        for name, (rows, columns) in shapes.items()
        for side, shape in (("A", (1, columns)), ("B", (rows, 1)))
    }
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": targets}
    try:
        check_content("a LoRA of it", settings, save(zeros), checkpoint)
    except AdapterRejected as error:
        missing = sorted(name for name in shapes if f"{name}.weight" not in checkpoint.weight_shapes)
        why = f"its checkpoint has no {some(missing)}" if missing else str(error)
        raise ConfigError(
            f"{base} cannot be trained: the engine would refuse every LoRA of a {config.model_type}, because {why}; "
            f"{_CURE}"
        ) from error
