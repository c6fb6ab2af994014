"""Shows what fits on one GPU, for `art-patch doctor --base NAME --gpu-memory GIB`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from art_patch import doctor, pipeline
from art_patch.cli import output
from art_patch.cli.options import Project
from art_patch.errors import ConfigError

_ROWS = {"serve": "serve", "train": "train", "both": "both at once"}


def show_forecast(project: Project, base: str | None, gpu_gib: float | None) -> None:
    """Print the forecast; exit with 1 if the base can be neither served nor trained on this GPU."""
    if base is None or gpu_gib is None:
        raise ConfigError("a forecast needs both: a base and a GPU, such as --base Qwen/Qwen3-8B --gpu-memory 24")
    shape = doctor.read_shape(base)
    pipeline.require_known(base, shape.model_type)  # where transformers is installed
    found = doctor.forecast(shape, gpu_gib)
    fits = {name: asdict(fit) for name in _ROWS if (fit := getattr(found, name))}
    facts: dict[str, Any] = {
        "base": base,
        "gpu_memory_gib": gpu_gib,
        "weights": shape.weights,
        "lora_weights": shape.lora(doctor.RANK),
        "context": shape.context,
        **fits,
        "untried": doctor.UNTRIED,
    }
    if not project.answered(facts):
        _print(facts)
    if not (found.serve.fits or found.train.fits):
        raise typer.Exit(1)


def _print(facts: dict[str, Any]) -> None:
    console, base = output.stdout(), facts["base"]
    size = f"{facts['weights'] / 1e9:.2f} billion weights; a LoRA of rank {doctor.RANK} has {facts['lora_weights']:,}"
    console.print(output.cell(f"{base} on one GPU of {facts['gpu_memory_gib']:g} GiB"), style="bold")
    console.print(size, style="dim")
    table = output.Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, title in _ROWS.items():
        fit = facts[name]
        needs = f"{fit['needs_gib']:.1f} GiB"
        if not fit["fits"]:
            table.add_row("[red]●[/]", title, f"does not fit: {needs} at least")
            continue
        context = "" if fit["context"] is None else f", with {fit['context']:,} tokens of context"
        table.add_row("[green]●[/]", title, f"fits: {needs}{context}")
        for command, options in fit["options"].items():
            named = f"--base {base} " if command == "serve" else ""
            table.add_row("", "", output.cell(f"art-patch {command} {named}{options}", style="dim"))
    console.print(table)
    if not facts["both"]["fits"] and facts["serve"]["fits"] and facts["train"]["fits"]:
        console.print("serve and train one after the other: stop the server for the update; apps go upstream meanwhile")
    output.print_below(console, f"from the configuration alone; {facts['untried']}")
