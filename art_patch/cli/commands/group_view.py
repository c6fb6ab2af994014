"""`art-patch groups show`: siblings of a group, their rewards, the judge's words, and what became of the group."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from art_patch import store, types
from art_patch.cli import output
from art_patch.cli.commands.measure import WAYS
from art_patch.cli.options import MOST_IDS, Project, the_one
from art_patch.cli.typed_options import command

_MEANS = {
    "formed": "its siblings have no reward yet",
    "scored": "an update may learn from it",
    "trained": "an update has learned from it",
    "dead": "it teaches nothing, so no update learns from it",
    "stale": "its answers are too old or too far for an update",
    "quarantined": "its scores are not believed, so no update learns from it",
    "spent": "it is used up and is not learned from",
}


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
        summaries = opened.browse.summaries(one.runs, openings=True)
        scores = {run.id: run.scores for run in opened.read.trajectories(one.runs)}
    siblings = [
        {**asdict(each), "scores": [asdict(score) for score in _of_group(scores.get(each.id, ()), one.id)]}
        for each in summaries
    ]
    if not project.answered(asdict(one) | {"siblings": siblings}):
        _print(one, summaries, scores)


def _of_group(scores: tuple[types.Score, ...], group: str) -> list[types.Score]:
    """Return the scores that were given in this group, or by users and code, oldest first."""
    return [score for score in scores if score.group_id in (None, group)]


def _print(one: store.GroupFacts, siblings: list[store.Summary], scores: dict[str, tuple[types.Score, ...]]) -> None:
    console, grid = output.stdout(), output.grid("dim", "")

    def row(name: str, words: str) -> None:
        grid.add_row(name, output.cell(words))

    console.print(output.Text(f"group {output.one_line(one.id)}", style="bold"))
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.created_at))
    row("state", f"{one.state}: {_MEANS.get(one.state, 'its run has copies that are siblings in other groups')}")
    if one.reason:
        row("why", one.reason)
    row("scenario", one.scenario_key)
    row("held out", "yes: for the gate only, never learned from" if one.held_out else "no")
    row("siblings by", f"{one.how}: {WAYS.get(one.how, 'not known to this release')}; formed {made}")
    row("learned by", output.listed(one.trained, "no policy"))
    for each in one.judgements:
        why = f": {each['reason']}" if each["reason"] else ""
        row("judged", f"{each['judge']}, rubric {each['rubric']}, for {each['purpose']}: {each['state']}{why}")
    console.print(grid)
    if not siblings:
        console.print("\nnone of its runs is in the store: they were erased, or moved to another group")
    for run in sorted(siblings, key=lambda run: -2.0 if run.reward is None else -run.reward):
        reward = "no reward" if run.reward is None else f"reward {run.reward:.2f}"
        failed = ", failed" if run.status == "error" else ""
        by = output.listed([output.one_line(name) for name in run.policies], "nobody")
        console.print()
        console.print(output.Text(output.one_line(run.id), style="bold"))
        lines = [f"{reward}{failed}, answered by {by}, {output.counted(run.calls, 'call', 'calls')}: {run.opening}"]
        for score in _of_group(scores.get(run.id, ()), one.id):
            lines.append(f"{score.name} {score.value:.2f} ({score.source}): {score.comment or 'without words'}")
        output.print_below(console, *lines)
