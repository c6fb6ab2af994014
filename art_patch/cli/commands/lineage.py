"""`art-patch policies show`: where a policy comes from, what it learned from, its tests, and how long it served."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from art_patch import insights
from art_patch.cli import output
from art_patch.cli.options import Project
from art_patch.cli.typed_options import command


@command
def show_policy(
    policy: Annotated[str, typer.Argument(help="NAME@STEP of a policy in any state.")], project: Project
) -> None:
    """Show where a policy comes from: parents, data, judge, settings, gate, time served, and what became of it.

    `--json` also has the ids of the groups and runs that it learned from, all settings and all metrics.

    Exit codes: 0 shown; 19 there is no such policy.
    """
    with project.opened() as (_, opened):
        now = time.time()
        story = insights.story_of(opened, policy, now=now)
    if project.answered(story.facts):
        return
    console, grid = output.stdout(), output.grid("dim", "")
    console.print(f"[b]{output.escape(story.policy.name)}[/] {story.policy.state}")
    for name, words in story.rows(now):
        grid.add_row(name, output.Text(output.visible(words)))
    console.print(grid)
    console.print()
    for move in reversed(story.history):
        change = f"{move['from_state'] or 'new'} -> {move['to_state']}"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(move["at"]))
        console.print(output.Text(f"{at}  {change}, by {output.one_line(move['who'])}"))
        output.print_below(console, *output.sentences(move["reason"]))
