"""`art-patch init` builds environments of their own for what excludes our packages: vLLM, and Unsloth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from art_patch import serving, training
from art_patch.cli import output
from art_patch.cli.options import Output
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError
from art_patch.settings import load_settings

_Built = TypeVar("_Built")


@command
def init_vllm(
    out: Output,
    cpu: Annotated[bool, Option("Install the build for CPUs, even if there is a GPU.")] = False,
    cuda: Annotated[bool, Option("Install the build for NVIDIA GPUs, even if none is found.")] = False,
) -> None:
    """Make a Python environment with vLLM, in the directory where `art-patch serve` looks for it.

    vLLM needs a separate environment because it requires a certain version of torch. On a machine with a GPU, vLLM's
    standard build is installed; on any other, its build for CPUs (1.9 GB, some minutes). It is safe to run the command
    again: a complete environment is kept.
    """
    if cpu and cuda:
        raise ConfigError("--cpu and --cuda exclude each other; leave both out to go by what is here")
    environments, found = load_settings().environments, serving.gpus()
    # --cuda also on a machine without a GPU, such as the one where an image is built.
    device: Any = "cuda" if cuda or (found and not cpu) else "cpu"
    if not out.as_json:
        why = f"{len(found)} GPU(s) found" if found else "no GPU found"
        output.stdout().print(f"vLLM for [b]{device}[/]" + ("" if cpu or cuda else f" ({why})"))
    there = serving.built(environments, device)
    here = there or _build(lambda tell: serving.build(environments, device, tell), out)
    if not out.answered({"python": str(here.python), "device": device, "versions": here.versions}):
        _say_built(f"vLLM {here.vllm}", there is not None, serving.home_of(environments, device))
        output.stdout().print("next: [b]art-patch serve --engine vllm --base MODEL[/]")


@command
def init_unsloth(out: Output) -> None:
    """Make a Python environment with Unsloth, in which `retrain --backend unsloth` runs the trainer's processes.

    Unsloth needs a separate environment because it requires a certain version of transformers. It trains on NVIDIA
    GPUs. On a machine without one, a build for CPUs is installed (2.9 GB), and the command says what does not work; to
    build for a GPU all the same, as for an image, set CUDA_VISIBLE_DEVICES=0. It is safe to run the command again: a
    complete environment is kept, and tried again.
    """
    environments, recipe = load_settings().environments, training.unsloth_recipe()
    if not (there := recipe.is_built(environments)):
        _build(lambda tell: recipe.build(environments, tell), out)
    python, versions = recipe.python(environments), recipe.look(recipe.python(environments)) or {}
    if (why_not := training.why_no_unsloth(python)) is None and not serving.gpus():
        why_not = "there is no CUDA GPU; Unsloth and the trainer can be imported"
    if not out.answered({"python": str(python), "versions": versions, "why_not": why_not}):
        _say_built(f"Unsloth {versions.get('unsloth')}", there, recipe.home(environments))
        if why_not is not None:
            output.stdout().print(f"it cannot train on this machine: {why_not}", markup=False, highlight=False)
        else:
            output.stdout().print("next: [b]art-patch retrain --backend unsloth[/]")


def _build(build: Callable[[Callable[[str], None]], _Built], out: Output) -> _Built:
    """Call `build` with a function that shows its steps, or with one that shows nothing if JSON is asked for."""
    if out.as_json:
        return build(lambda _: None)
    console = output.stdout()
    with console.status("starting") as shown:

        def tell(line: str) -> None:
            # A log file shows no spinner, so it gets lines; one for each package would be too many.
            if console.is_terminal:
                shown.update(line)
            elif not line.startswith("Collecting "):
                console.print(line, highlight=False)

        return build(tell)


def _say_built(what: str, there: bool, where: Path) -> None:
    output.stdout().print(f"{what} {'was there already,' if there else 'is ready'} in {where}")
