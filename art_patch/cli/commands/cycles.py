"""What cycles tell: `art-patch cycles` lists them, `retrain` notes its own, and `art-patch notify` tries the addresses.

`retrain` notes how it begins and ends in the log and in a file for metrics, and tells people of decisions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from art_patch import insights, notifications, pipeline, store
from art_patch._lib.events import event
from art_patch._lib.words import the_one
from art_patch.cli import output
from art_patch.cli.options import Output, Project
from art_patch.cli.typed_options import Option, command, is_before_subcommand
from art_patch.errors import ArtPatchError, ConfigError, GateRejected, NotFound, TrackerError
from art_patch.settings import Settings, load_settings

_ADVICE_S = 7 * 86_400.0  # the period of `art-patch report`


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


# --- what `retrain` notes of its cycle ---


@contextmanager
def noted(directory: Path) -> Generator[Callable[[dict[str, Any]], None]]:
    """Note how the command ends, for metrics: also if it fails before a cycle begins, such as for want of a store."""
    began, ended, code, outcome = time.monotonic(), dict[str, Any](), 1, ""
    try:
        yield ended.update
        outcome = str(ended["outcome"])
        code = GateRejected.exit_code if outcome == "rejected" else 0
    except BaseException as error:
        code, outcome = _exit_code(error), type(error).__name__
        raise
    finally:
        took_s = time.monotonic() - began
        pipeline.keep_last_retrain(directory, ended_at=time.time(), took_s=took_s, exit_code=code, outcome=outcome)


def _exit_code(error: BaseException) -> int:
    # A command that is stopped has an exit code of its own, and a mistake of ours has 1.
    return output.INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)


@contextmanager
def in_log(opened: store.Store, project: str) -> Generator[Callable[[dict[str, Any]], None]]:
    """Write the begin and the end of a cycle, and what it decided, into the log."""
    decisions, began, ended = pipeline.DecisionLog(opened.ledger), time.monotonic(), dict[str, Any]()
    event("cycle", "a cycle of %s begins", project, event="cycle begins", project=project)
    try:
        yield ended.update
        decisions.look()
    except BaseException as error:
        code = _exit_code(error)
        with suppress(ArtPatchError):
            decisions.look()
        facts: dict[str, Any] = {"event": "cycle failed", "error": type(error).__name__, "exit_code": code}
        words = "the cycle failed after %.1f s: %s, exit code %d"
        took_s = round(time.monotonic() - began, 3)
        event("cycle", words, took_s, facts["error"], code, level=logging.ERROR, took_s=took_s, **facts)
        raise
    took_s = round(time.monotonic() - began, 3)
    its: dict[str, Any] = {key: ended.get(key) for key in ("outcome", "candidate", "reason")}
    words = "the cycle ended after %.1f s: %s: %s"
    event("cycle", words, took_s, its["outcome"], its["reason"], event="cycle ended", took_s=took_s, **its)


@command
def notify(out: Output) -> None:
    """Send a test message to each address in ART_PATCH_NOTIFY, which `serve` and `retrain` tell of decisions.

    Exit codes: 0 all were sent; 2 there is no address, or one is wrong; 17 one was not sent.
    """
    settings = load_settings()
    if settings.notify is None:
        raise ConfigError(
            "ART_PATCH_NOTIFY is not set; it takes addresses such as slack://..., mailto://... or jsons://host/path"
        )
    message = notifications.of_test(settings.project)
    causes = {address.name: address.send(message) for address in notifications.addresses(settings.notify)}
    facts = [{"address": name, "sent": cause is None, "cause": cause} for name, cause in causes.items()]
    if not out.answered({"project": settings.project, "addresses": facts}):
        for name, cause in causes.items():
            mark = "[green]sent[/]" if cause is None else "[red]not sent[/]"
            output.stdout().print(f"{mark} {output.escape(name)}" + (f": {output.escape(cause)}" if cause else ""))
    if any(causes.values()):
        raise typer.Exit(TrackerError.exit_code)


def tell_people(opened: store.Store, settings: Settings, report: dict[str, Any]) -> None:
    """Send what was decided and what a cycle's report says, if there is an address; what fails is logged."""
    notifier = notifications.Notifier(settings.notify, settings.project, opened)
    if not notifier.is_on:
        return
    notifier.look()
    if report.get("outcome") == "waits for approval":
        notifier.waits(str(report["candidate"]), str(report["reason"]))
    until = time.time()
    used = opened.reports.usage(since=until - _ADVICE_S, until=until)
    advice = insights.make_report(used, lambda _: None, max_loss=settings.max_loss)
    notifier.advise(advice.verdict, advice.reasons)
