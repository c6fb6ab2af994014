"""Loads the base model and its tokenizer for the embedded engine.

Safetensors only, no code from the checkpoint. Raises `ModelNotFound`, with the remedy, for what cannot be loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from art_patch.errors import ConfigError, ModelNotFound

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(directory: Path, *, device: str = "auto", dtype: str = "auto") -> tuple[Any, Any]:
    """Loads model and tokenizer, ready for inference.

    Args:
        directory: A checkpoint.
        device: `auto` is CUDA where there is any, else the CPU.
        dtype: `auto` is float32 on the CPU and the checkpoint's own elsewhere.

    Returns:
        The causal language model and its tokenizer.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype not in {"auto", *_DTYPES}:
        raise ConfigError(f"dtype {dtype!r} is unknown. Use auto, {', '.join(_DTYPES)}.")
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    disable_progress_bar()  # a server's log is no place for it
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=_DTYPES.get(dtype, dtype), use_safetensors=True
        )
        model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelNotFound(f"{directory} cannot be loaded: {error}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise ModelNotFound(f"{directory} has no chat template. Use an instruction-tuned model, or add one.")
    model.eval().requires_grad_(False)
    return model, tokenizer
