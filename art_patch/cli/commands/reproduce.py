"""`art-patch reproduce`: makes the update of a policy again, and tells whether the weights are the same."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from art_patch import pipeline, training
from art_patch.cli import output
from art_patch.cli.options import Project
from art_patch.cli.typed_options import Option, command
from art_patch.errors import NotReproducible, OtherWeights


@command
def reproduce(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")],
    project: Project,
    anyway: Annotated[bool, Option("Make it also if packages or the device are not those of then.")] = False,
) -> None:
    """Make the update of a policy again from the store, and compare the weights; or say why that is not possible.

    Needs no engine, and takes as long as the update did. Nothing is published: the new weights are deleted. Runs of
    which data was erased are named by their digests in the policy's manifest.

    Exit codes: 0 no weight differs by more than 1e-6; 20 it cannot be made again; 21 the weights differ; 19 there is no
    such policy; 5 another one is being made again; 13 the update failed.
    """
    training.require_packages()
    with project.opened() as (settings, opened), output.bars(quiet=project.as_json) as progress:
        shown = partial(progress, "train")
        found = pipeline.reproduce(opened, settings.adapters, policy, anyway=anyway, progress=shown)
    if not project.answered(asdict(found) | {"equal": found.equal, "tolerance": pipeline.TOLERANCE}):
        _say(found)
    if not found.equal:
        raise typer.Exit((NotReproducible if found.equal is None else OtherWeights).exit_code)


def _say(found: pipeline.Reproduction) -> None:
    console = output.stdout()
    if found.largest_difference is None:
        console.print(f"[b]{output.escape(found.policy)}[/] cannot be made again:")
        for why in found.why_not.values():
            output.print_below(console, why)
        for kind, digests in found.runs_missing.items():
            output.print_below(console, f"{kind}, by the digests in the manifest: {', '.join(digests)}")
        return
    data = f"{output.counted(found.groups, 'group', 'groups')} with {output.counted(found.runs, 'run', 'runs')}"
    said = "equal" if found.equal else "[b]not equal[/]"
    said = "the weights are equal" if found.equal else "the weights are [b]not equal[/]"
    console.print(f"[b]{output.escape(found.policy)}[/] was made again in {output.seconds(found.took_s)}: {said}")
    output.print_below(
        console,
        f"the largest difference of {found.weights:,} weights is {found.largest_difference:.3g}; up to "
        f"{pipeline.TOLERANCE:g} counts as equal",
        f"it learned from {data}",
        *(f"{key} was {then}, and is {now} here" for key, (then, now) in found.made_with.items()),
    )
