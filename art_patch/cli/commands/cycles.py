"""`art-patch cycles`: what the last cycles did, whether the scheduled job ran, and what the next cycle waits for."""

from __future__ import annotations

import time
from typing import Annotated, Any, cast

import typer

from art_patch import insights, pipeline
from art_patch._lib.words import the_one
from art_patch.cli import output
from art_patch.cli.options import Project
from art_patch.cli.typed_options import Option, command, is_before_subcommand
from art_patch.errors import NotFound


@command
def cycles(
    context: typer.Context,
    project: Project,
    limit: Annotated[int, Option("Number of cycles.", also=("-n",), least=1)] = 10,
) -> None:
    """List the last cycles, newest first, when the scheduled job last ran, and what the next cycle waits for.

    The newest 200 reports are kept on the machine where the cycles ran.
    """
    if is_before_subcommand(context):
        return
    with project.opened() as (settings, opened):
        waits = insights.waits_for(settings, opened)
    found, now = list(insights.cycle_reports(settings.directory)), time.time()
    log = insights.job_log(settings.directory)
    if project.answered({"cycles": found[:limit], "kept": len(found), "log": log, "waits_for": waits}):
        return
    console = output.stdout()
    if not found:
        console.print(f"no cycle has left a report in {output.escape(str(settings.directory))}", soft_wrap=True)
    for facts in found[:limit]:
        _print_line(facts, now)
    if len(found) > limit:
        output.say(f"{limit} of {len(found)}; -n shows more", style="dim")
    console.print()
    if log is None:
        console.print(
            f"no {insights.JOB_LOG}: no job of `art-patch cron install` has run here (systemd logs to its journal)"
        )
    else:
        console.print(f"{insights.JOB_LOG} was last written {output.ago(now - log['at'])} ago:")
        output.print_below(console, log["last_line"] or "it is empty")
    console.print("the next cycle:")
    output.print_below(console, *waits)


@command
def show_cycle(
    cycle: Annotated[str, typer.Argument(help="Id of the cycle, or a beginning of it that no other id has.")],
    project: Project,
) -> None:
    """Show the report of one cycle: its outcome, cost, and the metrics of each stage.

    Exit codes: 0 shown; 2 several ids begin so; 19 there is no such cycle.
    """
    with project.opened() as (settings, _):
        pass  # a project that is not there is told before a cycle that is not
    ids = insights.cycle_ids(settings.directory, cycle)
    key = the_one(cycle, ids, "cycle", listed_by="art-patch cycles")
    facts = insights.cycle_report(settings.directory, key)
    if facts is None:
        raise NotFound(f"the report of {key} is gone or cannot be read")
    if project.answered(facts):
        return
    _print_line(facts, time.time())
    console = output.stdout()
    for stage, values in cast("dict[str, Any]", facts["metrics"]).items():
        console.print(f"\n[b]{output.escape(stage)}[/]")
        if not isinstance(values, dict):
            output.print_below(console, str(values))
            continue
        shown = ((key, value) for key, value in cast("dict[str, Any]", values).items() if key not in pipeline.LONG)
        output.print_below(console, *filter(None, (pipeline.metrics_line({key: value}) for key, value in shown)))
    output.say(f"\n{settings.directory / 'cycles' / facts['id']}.md", style="dim")


def _print_line(facts: dict[str, Any], now: float) -> None:
    console = output.stdout()
    code = "unknown" if facts["exit_code"] is None else facts["exit_code"]
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["began_at"]))
    cost = "cost unknown" if facts["judge_usd"] is None else f"${facts['judge_usd']:.4f}"
    cost += "" if facts["judge_usd_is_whole"] or facts["judge_usd"] is None else " or more"
    console.print(
        f"{facts['id']}  [b]{facts['outcome']}[/] {output.escape(str(facts.get('candidate') or ''))}".rstrip()
    )
    took = output.seconds(float(facts.get("took_s") or 0.0))
    ago = output.ago(now - facts["began_at"])
    lines = [f"{began}, {ago} ago; took {took}, judge {cost}, exit code {code}"]
    stages = {key: seconds for key, seconds in (facts.get("stages_s") or {}).items() if seconds >= 0.001}
    if stages:
        lines.append(", ".join(f"{stage} {output.seconds(seconds)}" for stage, seconds in stages.items()))
    if facts["unread"]:
        lines.append(f"could not be read: {', '.join(facts['unread'])}")
    output.print_below(console, *lines, *output.sentences(facts.get("reason", "")))
