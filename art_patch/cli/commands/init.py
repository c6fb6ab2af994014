"""`art-patch init`: what is made once on a machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from art_patch.cli.options.shared import JsonOption

app = typer.Typer(name="init", help="Prepare this machine: vllm.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Prepare this machine."""


def vllm(
    cpu: Annotated[bool, typer.Option("--cpu", help="A build for CPUs, whatever is here.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="A build for NVIDIA GPUs, whatever is here.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the environment that vLLM lives in; `art-patch serve` finds it there.

    It is apart from this one because vLLM pins its own torch. With a GPU it is vLLM's own build, else one for CPUs
    (1.9 GB, some minutes). Run it again without harm: what is complete is kept.
    """
    from art_patch.cli.views.output import answer, stdout
    from art_patch.errors import ConfigError
    from art_patch.serving import build, built, gpus, home_of
    from art_patch.settings import load_settings

    if cpu and cuda:
        raise ConfigError("--cpu and --cuda exclude each other; leave both out to go by what is here")
    settings, found = load_settings(), gpus()
    device: Any = "cuda" if cuda or (found and not cpu) else "cpu"
    console = stdout()
    here = there = built(settings.environments, device)
    if not as_json:
        why = f"{len(found)} GPU(s) found" if found else "no GPU found"
        console.print(f"vLLM for [b]{device}[/]" + ("" if cpu or cuda else f" ({why})"))
    if here is None and as_json:
        here = build(settings.environments, device, lambda _: None)
    elif here is None:
        with console.status("starting") as shown:

            def tell(line: str) -> None:
                # Without a terminal nothing would be seen for minutes; each package is too much to be read there.
                if console.is_terminal:
                    shown.update(line)
                elif not line.startswith("Collecting "):
                    console.print(line, highlight=False)

            here = build(settings.environments, device, tell)
    if as_json:
        answer({"python": str(here.python), "device": device, "versions": here.versions})
    else:
        word = "is ready" if there is None else "was there already,"
        console.print(f"vLLM {here.vllm} {word} in {home_of(settings.environments, device)}")
        console.print("next: [b]art-patch serve --engine vllm --base MODEL[/]")
