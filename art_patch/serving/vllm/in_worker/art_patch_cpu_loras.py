"""Corrects, inside vLLM on a CPU, the answers to requests without a LoRA that share a batch with requests with one.

vLLM's torch kernels take the index -1, which means "no LoRA", for the last place in the table of LoRAs. The policy in
that place, now or earlier, then answered for the bare base (seen in 0.32; the kernels for CUDA leave such rows out).
Here such rows become zero where they enter a LoRA, and add nothing where they leave it.

vLLM imports this file in its own interpreter, by `--worker-extension-cls`; it imports nothing of ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Extension:
    """An empty class for vLLM's worker to inherit; importing this module has the effect."""


def _correct() -> None:
    kernels: Any = import_module("vllm.lora.ops.torch_ops.lora_ops")
    callers: Any = import_module("vllm.lora.punica_wrapper.punica_cpu")
    original = kernels.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        original(inputs, weights, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(-1), 0)

    kernels.bgmv_shrink = callers.bgmv_shrink = bgmv_shrink  # the other kernels of the first look it up there


_correct()
