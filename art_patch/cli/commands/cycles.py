"""`art-patch cycles`: what the last cycles did, whether the scheduled job ran, and what the next cycle waits for.

The reports are files in the project's directory, which `pipeline/cycle_run.py` writes. A `retrain` that ended before
its cycle began, because no engine or no judge was there, leaves no report: its words are in the job's log, of which the
last line is shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from art_patch import errors, pipeline, store
from art_patch.cli import output
from art_patch.cli.options import Project, the_one
from art_patch.cli.typed_options import Option, command, is_before_subcommand
from art_patch.errors import ArtPatchError, GateRejected, NotFound
from art_patch.settings import Settings

JOB_LOG = "retrain.log"  # in the project's directory: to it crontab's line of `art-patch cron install` appends
_TAIL_BYTES = 8_192


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
        waits = waits_for(settings, opened)
    found, now = list(reports(settings.directory)), time.time()
    log = _log(settings.directory / JOB_LOG)
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
        console.print(f"no {JOB_LOG}: no job of `art-patch cron install` has run here (systemd logs to its journal)")
    else:
        console.print(f"{JOB_LOG} was last written {output.ago(now - log['at'])} ago:")
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
    ids = [path.stem for path in _files(settings.directory) if path.stem.startswith(cycle)]
    key = the_one(cycle, ids, "cycle", listed_by="art-patch cycles")
    facts = _read(settings.directory / "cycles" / f"{key}.json")
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


def reports(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the reports of a project's cycles, newest first, each with its id, exit code and the judge's cost."""
    for path in _files(directory):
        if (facts := _read(path)) is not None:
            yield facts


def waits_for(settings: Settings, opened: store.Store) -> list[str]:
    """Return what the next cycle would wait for, or that it would train."""
    ledger, config = opened.ledger, pipeline.CycleConfig()
    if (tested := ledger.challenger()) is not None:
        return [f"looks after {tested.name}, which is tested as a {tested.state}; nothing is trained meanwhile"]
    if ledger.leader() is None:
        return [pipeline.why_none_serves(opened)]
    found = [
        f"{each.name} won its gate and waits for `art-patch promote {each.name}`"
        for each in ledger.policies()
        if each.state == "candidate" and each.metrics.get("waits")
    ]
    scored = len(opened.read.group_ids(state="scored", held_out=False))
    formed = len(opened.read.group_ids(state="formed", held_out=False))
    held_out = len(opened.read.group_ids(state="formed", held_out=True))
    least = settings.gate_scenarios
    if scored < config.min_groups:
        waiting = output.counted(formed, "group waits", "groups wait")
        found.append(f"{scored} of {config.min_groups} scored groups that an update needs; {waiting} for the judge")
    if held_out < least:
        found.append(f"{held_out} groups are held out, and the gate needs {least} held-out scenarios")
    return found or [f"would train: {scored} scored groups, {held_out} held-out groups"]


def _files(directory: Path) -> list[Path]:
    # The names begin with the time.
    return sorted((directory / "cycles").glob("*-*.json"), key=lambda path: path.name, reverse=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts: Any = json.loads(path.read_text("utf-8"))
        kept: dict[str, Any] = facts | {"outcome": str(facts["outcome"]), "began_at": float(facts["began_at"])}
        time.localtime(kept["began_at"])
        kept |= {"took_s": float(facts.get("took_s") or 0.0), "reason": str(facts.get("reason") or "")}
        kept |= {"stages_s": {key: float(value) for key, value in (facts.get("stages_s") or {}).items()}}
        metrics: dict[str, Any] = dict(facts.get("metrics") or {})
        costs = [values["cost_usd"] for values in metrics.values() if isinstance(values, dict) and "cost_usd" in values]
        known = [float(cost) for cost in cast("list[Any]", costs) if cost is not None]
    # A cycle that ended just now deleted it, or somebody edited it.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return {
        "id": path.stem,
        **kept,
        "metrics": metrics,
        "exit_code": _exit_code(kept),
        "judge_usd": sum(known) if known or not costs else None,
        "judge_usd_is_whole": len(known) == len(costs),
    }


def _exit_code(facts: dict[str, Any]) -> int | None:
    """Return the exit code of the `retrain` that ran this cycle; `None` if the report does not tell it."""
    if facts["outcome"] != "failed":
        return GateRejected.exit_code if facts["outcome"] == "rejected" else 0
    # The reason of a failed cycle begins with the class of its error.
    error: Any = getattr(errors, str(facts.get("reason", "")).partition(":")[0], None)
    return error.exit_code if isinstance(error, type) and issubclass(error, ArtPatchError) else None


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
    output.print_below(console, *lines, *output.sentences(facts.get("reason", "")))


def _log(path: Path) -> dict[str, Any] | None:
    """Return when the job's log was last written, and its last line; `None` without a log."""
    try:
        with path.open("rb") as file:
            at = path.stat().st_mtime
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return None
    last = next((line for line in reversed(lines) if line.strip()), "")
    return {"path": str(path), "at": at, "last_line": output.one_line(last)}
