"""Reports: `art-patch report` (cost and quality), `analytics` (outcomes of runs), `groups` (numbers of siblings)."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_patch import insights, pipeline, rewards, store, trackers
from art_patch.cli import output
from art_patch.cli.commands.retrain import SETTLE_ONLY
from art_patch.cli.options import Project, RunFilter, make_embed, require_project
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ConfigError
from art_patch.pipeline import CycleConfig

if TYPE_CHECKING:
    from art_patch.insights import Analytics, Prices

_DAY_S = 86_400.0


@command
def report(
    project: Project,
    days: Annotated[float, Option(least=0.01, help="Number of days to look back.")] = 7.0,
    upstream_price: Annotated[
        tuple[float, float] | None,
        Option(
            metavar="IN OUT",
            env=True,
            help="US dollars that upstream charges for a million prompt tokens and completion tokens.",
        ),
    ] = None,
    litellm_prices: Annotated[
        bool, Option(help="Use litellm's list of prices by model in place of --upstream-price.")
    ] = False,
    gpu_usd_per_hour: Annotated[
        float | None, Option(least=0.0, env=True, help="Cost of the engine's GPUs in US dollars an hour.")
    ] = None,
    margin: Annotated[
        float, Option(least=0.0, help="How much lower the champion's mean score may be and still count as good.")
    ] = 0.05,
    markdown: Annotated[bool, Option(help="Print Markdown.")] = False,
) -> None:
    """Compare the champion with upstream: quality, failures, latency, money. The verdict may be "do not switch".

    Quality is measured by the scores from users, code and the judge. The money saved is upstream's price for the
    champion's answers, minus the cost of GPU, judge and updates. An unknown cost is reported as unknown, never counted
    as zero.

    Exit codes: 0 whatever the verdict; 2 an option has an impossible value; 8 there is no store.
    """
    from art_patch.cli import report_view

    if markdown and project.as_json:
        raise ConfigError("--markdown and --json are two forms; choose one")
    prices = _prices(upstream_price, litellm_prices)
    settings = project.settings()
    until = time.time()
    require_project(settings)
    database = store.open_database(settings.store_url, create=False, project=settings.project)
    try:
        used = store.usage(database, since=until - days * _DAY_S, until=until)
    finally:
        database.close()
    made = insights.make_report(used, prices, gpu_usd_per_hour=gpu_usd_per_hour, margin=margin)
    if project.as_json:
        output.answer({"project": settings.project, "days": days, **report_view.as_facts(made)})
    elif markdown:
        typer.echo(report_view.as_markdown(made, settings.project), nl=False)
    else:
        report_view.show(made, settings.project, output.stdout())


def _prices(given: tuple[float, float] | None, litellm_prices: bool) -> Prices:
    """Return a function from a model to its prices; without any source it knows none."""
    if given is not None and litellm_prices:
        raise ConfigError("--upstream-price and --litellm-prices are two sources; choose one")
    if given is not None and not all(math.isfinite(price) and price >= 0 for price in given):
        raise ConfigError(f"{given[0]:g} {given[1]:g} are no prices; give dollars a million tokens, such as 0.25 2")
    if not litellm_prices:
        return lambda _: given

    def from_litellm(model: str) -> tuple[float, float] | None:
        # Asked for a thousand tokens, not a million: some providers charge more a token for very long prompts.
        prompt, completion = rewards.price_usd(model, 1_000, 0), rewards.price_usd(model, 0, 1_000)
        return None if prompt is None or completion is None else (prompt * 1_000, completion * 1_000)

    return from_litellm


@command
def analytics(
    wanted: RunFilter,
    project: Project,
    success_at: Annotated[float, Option(help="Smallest reward of a successful run.")] = 0.5,
) -> None:
    """Count how many runs succeeded, how long they took, which tools they called, and how they failed.

    A run that failed with an error counts as not successful, whatever its reward. A run with neither an error nor a
    reward is left out of the success rates.
    """
    chosen = wanted.chosen()
    with project.opened() as (settings, opened):
        episodes = (episode for page in trackers.pages_of_episodes(opened, chosen) for episode in page)
        found = insights.analyse(episodes, success_at=success_at)
    if project.as_json:
        output.answer({"project": settings.project, "success_at": success_at, **asdict(found)})
    else:
        _print_analytics(found)


def _print_analytics(found: Analytics) -> None:
    console = output.stdout()
    if not found.overall.runs:
        console.print("no run matches; `art-patch trajectories list` shows what there is")
        return
    numbers = ("runs", "failed", "judged", "success", "reward", "calls a run")
    outcomes = output.table("answered by", *numbers, right=numbers)
    for name, one in {"all": found.overall, **found.by_policy}.items():
        rate = "unknown" if one.success_rate is None else f"{one.success_rate:.0%}"
        row = (one.runs, one.failed, one.judged, rate, _number(one.mean_reward), _number(one.mean_steps))
        outcomes.add_row(name, *map(str, row))
    console.print(outcomes)
    for title, last, rows in (
        ("tool", "share", [(one.name, one.times, one.runs, f"{one.share:.0%}") for one in found.actions]),
        ("error", "newest", [(one.pattern, one.times, one.runs, output.visible(one.example)) for one in found.errors]),
    ):
        if rows:
            table = output.table(title, "times", "runs", last, right=("times", "runs", last))
            for text, *counts in rows:
                table.add_row(output.cell(text), *map(str, counts))
            console.print()
            console.print(table)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


WAYS = {
    "group_key": "art.group(key) was around them",
    "scenario_key": "trajectory(scenario=...) names their task",
    "sibling_spans": "attempts at one task within a run",
    "same_task": "asked in the same words",
    "near_duplicate": "asked in nearly the same words",
    "resampled": "a turn of a lone run, answered again",
    "single": "one run, for the gate",
}
"""The ways in which siblings are found, the most certain first, with their description."""

_NOT_JUDGED = ("formed", "quarantined")  # states of a group whose scores do not count


@command
def groups(
    cycle: Annotated[CycleConfig, SETTLE_ONLY],
    project: Project,
    min_size: Annotated[
        int | None, Option(least=2, help="Siblings that a group needs. Default: as many as `retrain` needs.")
    ] = None,
    limit: Annotated[int, Option(least=1, help="Number of waiting runs to look at, oldest first.")] = 10_000,
) -> None:
    """Show which share of the traffic can be learned from in groups, and how siblings were found. Changes nothing.

    Runs without a group are grouped as `retrain` would group them. If the settings name an embedding model, it is
    called for that.
    """
    settings = project.settings()
    config = replace(cycle, across=settings.group_across, embed=make_embed(settings))
    if min_size is not None:
        config = replace(config, min_group_size=min_size)
    require_project(settings)
    database = store.open_database(settings.store_url, create=False, project=settings.project)
    try:
        stats = store.group_stats(database)
        pending = store.Reader(database).ungrouped(settled_before=time.time() - config.settle_s, limit=limit)
    finally:
        database.close()
    ids = count()
    grouping = pipeline.form(pending, config, lambda: str(next(ids)))
    would = dict.fromkeys(WAYS, 0)
    for group in grouping.groups:
        # Attempts within a run are counted by run, below: one run may hold several such groups.
        if group.how != "sibling_spans":
            would[group.how] += len(group.trajectories)
    left = dict(grouping.left)
    would["sibling_spans"] = left.pop("its spans are siblings", 0)
    ways = {
        way: {"groups": stats.ways.get(way, 0), "runs": stats.runs.get(way, 0), "would_be": would[way]} for way in WAYS
    }
    judged = sum(number for state, number in stats.states.items() if state not in _NOT_JUDGED)
    standing, more = sum(stats.runs.values()), sum(would.values())
    facts: dict[str, Any] = {
        "runs": stats.all_runs,
        "in_groups": standing,
        "would_be_grouped": more,
        "groupable_share": (standing + more) / stats.all_runs if stats.all_runs else None,
        "looked_at": len(pending),
        "ways": {way: counts for way, counts in ways.items() if any(counts.values())},
        "left": left,
        "embeddings": grouping.embeddings,
        "groups": sum(stats.states.values()),
        "states": dict(stats.states),
        "held_out": stats.held_out,
        "sizes": dict(stats.sizes),
        "dead_share": stats.states.get("dead", 0) / judged if judged else None,
    }
    output.answer(facts) if project.as_json else _print_groups(facts)


def _print_groups(facts: dict[str, Any]) -> None:
    console, runs = output.stdout(), facts["runs"]
    if not runs:
        console.print("no trajectories are recorded yet; run your agent with art_patch.patch()")
        return
    summary = output.grid("dim", "")
    beyond = runs - facts["in_groups"] - facts["looked_at"]
    share = f"[b]{facts['groupable_share']:.0%}[/] of {runs} runs"
    summary.add_row("groupable", share + (f"; {beyond} were not looked at" if beyond > 0 else ""))
    states = output.listed([f"{number} {state}" for state, number in facts["states"].items()], "none yet")
    summary.add_row("groups", states + (f"; {facts['held_out']} held out for the gate" if facts["held_out"] else ""))
    if facts["dead_share"] is not None:
        why = "all siblings that are trained were scored alike"
        summary.add_row("dead", f"{facts['dead_share']:.0%} of those that were judged: {why}")
    if facts["sizes"]:
        summary.add_row("sizes", ", ".join(f"{number} of {size}" for size, number in facts["sizes"].items()))
    console.print(summary)
    if facts["ways"]:
        numbers = ("runs", "share", "more now")
        table = output.table("siblings by", *numbers, "", right=numbers, whole=numbers, padding=(0, 2, 0, 0))
        table.pad_edge, table.columns[-1].style = False, "dim"
        for way, counts in facts["ways"].items():
            both = counts["runs"] + counts["would_be"]
            table.add_row(way, str(counts["runs"]), f"{both / runs:.0%}", str(counts["would_be"]), WAYS[way])
        console.print()
        console.print(table)
    if facts["left"]:
        console.print()
        for reason, number in sorted(facts["left"].items(), key=lambda item: -item[1]):
            console.print(f"{number} left: {reason}", markup=False, style="dim")
    if facts["embeddings"]:
        console.print(f"\ngrouped by words alone: {facts['embeddings']}", markup=False, style="dim")
