"""Unsloth in an environment of its own: builds and finds it, and lets the processes of an update run there.

Unsloth takes only older releases of transformers than the engine may need, and changes transformers when it is
imported. So it gets a virtual environment of its own, as vLLM does, and `launch` starts the trainer's processes with
that interpreter. The environment holds Unsloth and what the trainer imports, but not art_patch: each process imports
the art_patch of the process that starts it, so both always have the same release.

With Unsloth's kernels, text that rows have in common is not shared: each row is computed by itself, and the metric
`why_not_shared` of the update says so.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from art_patch._lib.own_environment import TORCH_CPU, Recipe, gpus, own_variables
from art_patch.errors import ConfigError

_PACKAGE = Path(__file__).parents[2]  # art_patch
BUILD_UNSLOTH = "art-patch init unsloth"
# Unsloth is released almost daily, and what it changes in transformers with it: the tried releases, exactly. The last
# line is what the trainer imports and Unsloth does not bring.
_PACKAGES = (
    "unsloth==2026.10.9 unsloth_zoo==2026.10.9 torch==2.13.0 transformers==5.17.0 peft==0.21.2 accelerate==1.15.0 "
    "uuid-utils>=0.11,<2"
)
_PEFT_INSTEAD = "take backend='peft', which gives the same policy"


def unsloth_recipe() -> Recipe:
    """Returns what the environment is made of: for NVIDIA GPUs if this machine has one, else for its CPU."""
    on_cpu = not gpus()
    return Recipe(
        "unsloth",
        "cpu" if on_cpu else "cuda",
        steps=(TORCH_CPU, _PACKAGES) if on_cpu else (_PACKAGES,),
        # PyPI's is compiled for CUDA, and beside a torch that is not, transformers cannot be imported.
        but=("torchvision",) if on_cpu else (),
        packages=("unsloth", "unsloth_zoo", "torch", "transformers", "peft"),
        requires=("unsloth",),
        code="import torch, transformers, peft, accelerate, safetensors, pydantic, uuid_utils",
    )


def why_no_unsloth(python: Path) -> str | None:
    """Returns why an update by Unsloth cannot begin here with the interpreter `python`; `None` if it can.

    It imports Unsloth and the trainer as a process of an update does. Takes up to a minute.
    """
    code = "import unsloth, art_patch.training.loop.update"
    with TemporaryDirectory(prefix="art-patch-") as directory:
        done = subprocess.run(
            [python, "-P", "-c", code], env=variables_with_ours(Path(directory)), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return said[-1].strip() if said else f"it ended with exit code {done.returncode}"


def unsloth_python() -> Path:
    """Returns the interpreter that has Unsloth: this process's, or that of the environment that was built for it.

    Raises a `ConfigError` if this machine has no GPU or no such environment.
    """
    if not gpus():
        raise ConfigError(f"backend='unsloth', but there is no CUDA GPU; {_PEFT_INSTEAD}")
    if find_spec("unsloth") is not None:
        return Path(sys.executable)
    from art_patch.settings import load_settings

    recipe, root = unsloth_recipe(), load_settings().environments
    if not recipe.is_built(root):
        raise ConfigError(f"backend='unsloth', but it is not installed; run `{BUILD_UNSLOTH}`, or {_PEFT_INSTEAD}")
    return recipe.python(root)


def variables_with_ours(directory: Path) -> dict[str, str]:
    """Returns the variables for an interpreter of another environment that imports this process's art_patch.

    `directory` is an empty one that stays while the interpreter runs.
    """
    # A link to the package alone: its own directory may be a site-packages, whose torch would be imported as well.
    (directory / "art_patch").symlink_to(_PACKAGE, target_is_directory=True)
    return {**own_variables(), "PYTHONPATH": str(directory)}
