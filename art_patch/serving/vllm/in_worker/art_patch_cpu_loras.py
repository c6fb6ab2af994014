"""Mends, inside vLLM on a CPU, what a request without a LoRA gets beside requests with one.

vLLM's torch kernels take the -1 that means "no LoRA" for an index, and so for the last place in the table of LoRAs:
the bare base was answered for by whatever policy had filled that place, then or earlier (seen in 0.32; the kernels for
CUDA leave such rows out). Here such rows become zero where they enter a LoRA, and add nothing where they leave it.

vLLM imports this file in its own interpreter, by `--worker-extension-cls`; it needs nothing of ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Extension:
    """What vLLM's worker inherits: nothing. The import is what counts."""


def _mend() -> None:
    kernels: Any = import_module("vllm.lora.ops.torch_ops.lora_ops")
    callers: Any = import_module("vllm.lora.punica_wrapper.punica_cpu")
    original = kernels.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        original(inputs, weights, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(-1), 0)

    kernels.bgmv_shrink = callers.bgmv_shrink = bgmv_shrink  # the other kernels of the first look it up there


_mend()
