"""Checks of what this machine can serve with: its GPUs, and the environment of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from art_patch.doctor.finding import Finding
from art_patch.errors import ConfigError
from art_patch.serving import BUILD, Found


def gpu(gpus: Sequence[str]) -> Finding:
    """How many there are.

    Args:
        gpus: those that may be used, as `CUDA_VISIBLE_DEVICES` names them.
    """
    if not gpus:
        return Finding("gpu", "ok", "none")
    return Finding("gpu", "ok", f"{len(gpus)} NVIDIA GPU{'s' if len(gpus) > 1 else ''}: {', '.join(gpus)}")


def vllm(find: Callable[[], Found | None], gpus: Sequence[str]) -> Finding:
    """Which vLLM would serve.

    Args:
        find: looks for its environment.
        gpus: those that may be used.
    """
    try:
        found = find()
    except ConfigError as error:
        return Finding("vllm", "bad", str(error))
    if found is None and gpus:
        return Finding("vllm", "warn", "none, though a GPU is here: the embedded engine serves, slowly", BUILD)
    if found is None:
        return Finding("vllm", "ok", "none; the embedded engine serves")
    torch = found.versions.get("torch", "is missing")
    text = f"{found.vllm} for {'GPUs' if found.device == 'cuda' else 'CPUs'}, torch {torch}, at {found.python}"
    if found.device == "cpu" and gpus:
        return Finding("vllm", "warn", f"{text}: the GPU here lies idle", BUILD)
    if found.device == "cpu":
        text += "; the embedded engine serves unless `art-patch serve --engine vllm` says so"
    elif not gpus:
        text += "; without a GPU the embedded engine serves"
    return Finding("vllm", "ok", text)
