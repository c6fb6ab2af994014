"""`art-patch groups show`: siblings of a group, their rewards, the judge's words, and what became of the group."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from art_patch import insights
from art_patch._lib.words import MOST_IDS, the_one
from art_patch.cli import output
from art_patch.cli.options import Project
from art_patch.cli.typed_options import command


@command
def show_group(
    group: Annotated[str, typer.Argument(help="Id of the group, or a beginning of it that no other id has.")],
    project: Project,
) -> None:
    """Show one group: its siblings with their rewards, the judge's words, and why it is dead or quarantined.

    Exit codes: 0 shown; 2 several ids begin so; 19 there is no such group.
    """
    with project.opened() as (_, opened):
        found = {each.id: each for each in opened.browse.groups_like(group, limit=MOST_IDS)} if group else {}
        one = found[the_one(group, list(found), "group", listed_by="art-patch trajectories list --json")]
        facts = insights.group_facts(opened, one)
    if not project.answered(facts):
        _print(facts)


def _print(facts: dict[str, Any]) -> None:
    console, grid = output.stdout(), output.grid("dim", "")

    def row(name: str, words: str) -> None:
        grid.add_row(name, output.cell(words))

    console.print(output.Text(f"group {output.one_line(facts['id'])}", style="bold"))
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["created_at"]))
    row("state", f"{facts['state']}: {insights.state_in_words(facts['state'])}")
    if facts["reason"]:
        row("why", facts["reason"])
    row("scenario", facts["scenario_key"])
    row("held out", "yes: for the gate only, never learned from" if facts["held_out"] else "no")
    row("siblings by", f"{facts['how']}: {insights.way_in_words(facts['how'])}; formed {made}")
    row("learned by", output.listed(facts["trained"], "no policy"))
    for each in facts["judgements"]:
        why = f": {each['reason']}" if each["reason"] else ""
        row("judged", f"{each['judge']}, rubric {each['rubric']}, for {each['purpose']}: {each['state']}{why}")
    console.print(grid)
    if not facts["siblings"]:
        console.print("\nnone of its runs is in the store: they were erased, or moved to another group")
    for run in insights.best_first(facts["siblings"]):
        reward = "no reward" if run["reward"] is None else f"reward {run['reward']:.2f}"
        failed = ", failed" if run["status"] == "error" else ""
        by = output.listed([output.one_line(name) for name in run["policies"]], "nobody")
        console.print()
        console.print(output.Text(output.one_line(run["id"]), style="bold"))
        lines = [
            f"{reward}{failed}, answered by {by}, {output.counted(run['calls'], 'call', 'calls')}: {run['opening']}"
        ]
        for score in run["scores"]:
            words = score["comment"] or "without words"
            lines.append(f"{score['name']} {score['value']:.2f} ({score['source']}): {words}")
        output.print_below(console, *lines)
