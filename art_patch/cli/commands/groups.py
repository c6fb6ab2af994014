"""`art-patch groups`: which share of the traffic has siblings, and by which way it found them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import typer

from art_patch.cli.options.opening import require_project
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption

WAYS = {
    "group_key": "art.group(key) was around them",
    "scenario_key": "trajectory(scenario=...) names their task",
    "sibling_spans": "attempts at one task within a run",
    "same_task": "asked in the same words",
    "near_duplicate": "asked in nearly the same words",
    "resampled": "a turn of a lone run, answered again",
    "single": "one run, for the gate",
}
"""How siblings come about, most certain first, in words."""

_NOT_JUDGED = ("formed", "quarantined")


def groups(
    min_size: Annotated[
        int | None, typer.Option("--min-size", min=2, help="Siblings that a group needs; as many as `retrain` wants.")
    ] = None,
    settle_s: Annotated[
        float, typer.Option("--settle-s", help="A trajectory is whole when it was silent this long.")
    ] = 60.0,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Look at so many runs that wait, oldest first.")
    ] = 10_000,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much of the traffic can be learned from in groups, and how it was grouped. Changes nothing.

    What is not grouped yet is grouped as `retrain` would; an embedding model is asked if settings name one.
    """
    from itertools import count

    from art_patch.cli.options.meaning import make_embed
    from art_patch.cli.views.output import answer
    from art_patch.pipeline import CycleConfig, form
    from art_patch.settings import load_settings
    from art_patch.store import Reader, group_stats, open_database

    settings = load_settings(project=project, home=home, store=store)
    config = CycleConfig(settle_s=settle_s, across=settings.group_across, embed=make_embed(settings))
    if min_size is not None:
        config = replace(config, min_group_size=min_size)
    ids = count()
    require_project(settings)
    database = open_database(settings.store_url, create=False, project=settings.project)
    try:
        stats = group_stats(database)
        pending = Reader(database).ungrouped(settled_before=time.time() - config.settle_s, limit=limit)
    finally:
        database.close()
    grouping = form(pending, config, lambda: str(next(ids)))
    would = dict.fromkeys(WAYS, 0)
    for group in grouping.groups:
        if group.how != "sibling_spans":
            would[group.how] += len(group.trajectories)
    left = dict(grouping.left)
    would["sibling_spans"] = left.pop("its spans are siblings", 0)
    ways = {
        way: {"groups": stats.ways.get(way, 0), "runs": stats.runs.get(way, 0), "would_be": would[way]} for way in WAYS
    }
    ways = {way: counts for way, counts in ways.items() if any(counts.values())}
    judged = sum(n for state, n in stats.states.items() if state not in _NOT_JUDGED) if stats.states else 0
    dead = stats.states.get("dead", 0)
    standing = sum(stats.runs.values())
    facts: dict[str, Any] = {
        "runs": stats.all_runs,
        "in_groups": standing,
        "would_be_grouped": sum(would.values()),
        "groupable_share": (standing + sum(would.values())) / stats.all_runs if stats.all_runs else None,
        "looked_at": len(pending),
        "ways": ways,
        "left": left,
        "embeddings": grouping.embeddings,
        "groups": sum(stats.states.values()),
        "states": dict(stats.states),
        "held_out": stats.held_out,
        "sizes": dict(stats.sizes),
        "dead_share": dead / judged if judged else None,
    }
    answer(facts) if as_json else _print(facts)


def _print(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from art_patch.cli.views.output import stdout

    console, runs = stdout(), facts["runs"]
    if not runs:
        console.print("no trajectories are recorded yet; run your agent with art_patch.patch()")
        return
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="dim")
    summary.add_column()
    beyond = runs - facts["in_groups"] - facts["looked_at"]
    share = f"[b]{facts['groupable_share']:.0%}[/] of {runs} runs"
    summary.add_row("groupable", share + (f"; {beyond} were not looked at" if beyond > 0 else ""))
    states = ", ".join(f"{count} {state}" for state, count in facts["states"].items()) or "none yet"
    summary.add_row("groups", states + (f"; {facts['held_out']} held out for the gate" if facts["held_out"] else ""))
    if facts["dead_share"] is not None:
        why = "all siblings that are trained were scored alike"
        summary.add_row("dead", f"{facts['dead_share']:.0%} of those that were judged: {why}")
    if facts["sizes"]:
        summary.add_row("sizes", ", ".join(f"{count} of {size}" for size, count in facts["sizes"].items()))
    console.print(summary)
    if facts["ways"]:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("siblings by")
        for column in ("runs", "share", "more now"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("", style="dim", overflow="fold")
        for way, counts in facts["ways"].items():
            both = counts["runs"] + counts["would_be"]
            table.add_row(way, str(counts["runs"]), f"{both / runs:.0%}", str(counts["would_be"]), WAYS[way])
        console.print()
        console.print(table)
    if facts["left"]:
        console.print()
        for reason, count in sorted(facts["left"].items(), key=lambda item: -item[1]):
            console.print(f"{count} left: {reason}", markup=False, style="dim")
    if facts["embeddings"]:
        console.print(f"\ngrouped by words alone: {facts['embeddings']}", markup=False, style="dim")
