"""Choose the engine: the one the user asked for, else the best one that this machine can run, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from art_patch.errors import ConfigError
from art_patch.serving.vllm.environment import BUILD, Found, find_vllm, gpus

Kind = Literal["auto", "embedded", "vllm"]


class Choice(NamedTuple):
    """An engine.

    Attributes:
        vllm: the environment of vLLM; `None` is the embedded engine.
        gpus: those that may be used.
    """

    vllm: Found | None
    gpus: list[str]
    why: str


def choose(kind: str, device: str, *, python: Path | None, environments: Path) -> Choice:
    """Chooses the engine.

    Args:
        kind: `auto`, `embedded` or `vllm`.
        device: `auto`, `cpu`, `cuda`, `cuda:1`.
        python: interpreter of an environment with vLLM, if the user names one.
        environments: where environments are built.

    Raises:
        ConfigError: vLLM is asked for and is not there, or is a build for another device.
    """
    if kind not in get_args(Kind):
        raise ConfigError(f"--engine {kind} is unknown; use {', '.join(get_args(Kind))}")
    here = [] if device == "cpu" else _one_of(gpus(), device)
    if kind == "embedded":
        return Choice(None, here, "asked for")
    # A CPU build of vLLM is used only if it is asked for by name.
    if kind == "auto" and not here:
        return Choice(None, here, "no GPU" if device == "auto" else f"--device {device}")
    found = find_vllm(python, environments)
    if kind == "auto":
        # No error: whoever asked for nothing in particular gets an engine that works, and the reason names the cure.
        if found is None or found.device != "cuda":
            return Choice(None, here, f"a GPU is here, but no vLLM for it; build its environment: {BUILD}")
        return Choice(found, here, f"vLLM {found.vllm} on {len(here)} GPU(s)")
    if found is None:
        raise ConfigError(f"there is no vLLM; build its environment with `{BUILD}`, or set ART_PATCH_VLLM_PYTHON")
    if found.device == "cpu" and device not in ("auto", "cpu"):
        raise ConfigError(f"the vLLM of {found.python} is a build for CPUs; build another: {BUILD} --cuda")
    if found.device == "cuda" and not here:
        raise ConfigError(f"the vLLM of {found.python} is a build for GPUs, and none is here: {BUILD} --cpu")
    return Choice(found, here if found.device == "cuda" else [], f"vLLM {found.vllm} on {cast(str, found.device)}")


def share_out(gpus: list[str], replicas: int, each: int) -> list[list[str]]:
    """Returns the GPUs of each replica.

    Raises:
        ConfigError: there are too few.
    """
    if replicas * each > len(gpus):
        raise ConfigError(
            f"--replicas {replicas} with --tensor-parallel-size {each} needs {replicas * each} GPUs, not {len(gpus)}"
        )
    return [gpus[number * each : (number + 1) * each] for number in range(replicas)]


def _one_of(found: list[str], device: str) -> list[str]:
    """The GPUs that `--device` leaves: all of them, or the one it names."""
    number = device.partition(":")[2]
    if not number:
        return found
    if not number.isdigit() or int(number) >= len(found):
        raise ConfigError(f"--device {device}: {len(found)} GPUs are here")
    return [found[int(number)]]
