"""Corrects a bug of vLLM on a CPU: a request without a LoRA gets wrong answers in a batch with requests for a LoRA.

vLLM's torch kernels read the index -1, which means "no LoRA", as the last slot of the table of LoRAs. So the policy
that is or was in that slot also changed the answers of the base model (seen in vLLM 0.32; the CUDA kernels skip such
rows). This module sets such rows to zero where they enter a LoRA, so that they add nothing to the output.

vLLM imports this file in its own interpreter; the file imports no other module of ours.
"""

from importlib import import_module
from typing import Any


class Extension:
    """Empty: `--worker-extension-cls` makes vLLM's worker inherit it, and the import of this module has the effect."""


def _correct() -> None:
    kernels: Any = import_module("vllm.lora.ops.torch_ops.lora_ops")
    callers: Any = import_module("vllm.lora.punica_wrapper.punica_cpu")
    original = kernels.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        original(inputs, weights, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(-1), 0)

    kernels.bgmv_shrink = callers.bgmv_shrink = bgmv_shrink  # the other kernels of the first look it up there


_correct()
