"""Builds virtual environments for programs whose packages exclude ours, and finds them again.

A `Recipe` says what pip installs. The directory of an environment is named by a hash of its recipe, so a changed recipe
gives another directory. An environment counts only when everything is installed and the recipe's code has run in it
once; one that is half built is deleted at the next try. This module imports nothing of what it installs.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_patch._lib.atomic_files import write_whole
from art_patch._lib.process import Child
from art_patch.errors import EngineError

# First, and from PyTorch's own index: what PyPI has under that version brings 3 GB of CUDA and triton along. An index
# that cannot be reached is passed over, so that a mirror, or PyPI, may have it.
TORCH_CPU = "--no-deps --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0"

# Written last: an environment without this file was left half built.
_COMPLETE = "art-patch.json"

_LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an environment is made of."""

    name: str  # of the program, such as `vllm`; the directory's name begins with it
    device: str  # `cpu` or `cuda`
    steps: Sequence[str]  # the arguments of each `pip install`; a word `X.txt` is a file of `requirements`
    packages: Sequence[str]  # distributions whose versions people want to know
    requires: Sequence[str]  # distributions of which one must be there
    code: str  # Python code that must run before the environment counts as complete
    but: Sequence[str] = ()  # distributions that are taken out again
    requirements: Path | None = None  # directory; its files that begin with the device belong to the recipe

    def home(self, root: Path) -> Path:
        """Return the directory of the environment below `root`, whether it is there or not."""
        # A virtual environment outlives the patch releases of its Python; built again it would be another 2 GB.
        python = "{}.{}".format(*sys.version_info)
        files = [] if self.requirements is None else sorted(self.requirements.glob(f"{self.device}_*.txt"))
        text = "\n".join([self.device, python, *self.steps, *self.but, *(file.read_text() for file in files)])
        return root / f"{self.name}-{self.device}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def python(self, root: Path) -> Path:
        """Return the interpreter of the environment below `root`."""
        return self.home(root) / "bin" / "python"

    def is_built(self, root: Path) -> bool:
        """Whether `build` has made this environment below `root`, and completed it."""
        return (self.home(root) / _COMPLETE).is_file()

    def look(self, python: Path) -> dict[str, str] | None:
        """Return the versions of `packages` in an interpreter's environment; `None` if it lacks what is required."""
        found = versions_in(python, self.packages) or {}
        return found if set(self.requires) & set(found) else None

    def build(self, root: Path, tell: Callable[[str], None]) -> dict[str, str]:
        """Build the environment below `root` with pip, and return its versions; an earlier build is deleted first.

        `tell` is called with a line for each step. Raises an `EngineError` with the last lines of the output if pip or
        the recipe's code failed.
        """
        directory, python = self.home(root), self.python(root)
        # Begun anew each time: pip leaves half-installed packages behind when it is interrupted.
        shutil.rmtree(directory, ignore_errors=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        tell(f"building {directory} ...")
        _run([sys.executable, "-m", "venv", str(directory)], tell)
        for arguments in self.steps:
            words = [
                str(self.requirements / word) if self.requirements is not None and word.endswith(".txt") else word
                for word in arguments.split()
            ]
            _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", *words], tell)
        if self.but:
            _run([str(python), "-m", "pip", "uninstall", "--yes", *self.but], tell)
        if (versions := self.look(python)) is None:
            raise EngineError(f"pip installed no {self.requires[0]} into {directory}; see what it said above")
        # Run once before it counts as complete: missing system libraries show here, not when they are needed.
        _run([str(python), "-c", self.code], tell)
        write_whole(directory / _COMPLETE, json.dumps({"device": self.device, "versions": versions}) + "\n")
        return versions


def versions_in(python: Path, packages: Sequence[str]) -> dict[str, str] | None:
    """Return the versions of those `packages` that an interpreter has; `None` if `python` is not an interpreter."""
    try:
        # Reads package metadata and imports nothing, which would take seconds. -I: in its own environment alone.
        line = [python, "-I", "-c", _LOOK, *packages]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def own_variables() -> dict[str, str]:
    """Return this process's variables without those that lead an interpreter to another environment than its own."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def gpus() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, named as in `CUDA_VISIBLE_DEVICES`; empty if it has none."""
    # Asked without torch, which this process need not have; the variable wins because CUDA obeys it, too.
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in chosen.split(",") if name and name != "-1"]
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # also if there is no such program
        return []
    return [str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def _run(line: list[str], tell: Callable[[str], None]) -> None:
    said: deque[str] = deque(maxlen=21)
    child = Child(line, own_variables(), stderr=subprocess.STDOUT, kernel_ends_it=True)
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
