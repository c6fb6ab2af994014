"""`art-patch status` (counts and policies), `doctor` (checks of the setup), and `mode` (switches running apps)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, cast, get_args

import typer

from art_patch import doctor as examinations
from art_patch import insights, pipeline, promotion, store, types
from art_patch._lib.atomic_files import replacing
from art_patch.cli import output
from art_patch.cli.followers import DryRun, Wait, followed
from art_patch.cli.forecast_view import show_forecast
from art_patch.cli.options import FROM_ENV_FILE, ActingProject, Project, extra
from art_patch.cli.typed_options import Option, command, given_on_the_command_line, setting, variables_of
from art_patch.errors import ArtPatchError, ConfigError
from art_patch.settings import Settings, read_settings

_MOST_APPS = 10
_COUNTS = {
    "queued": "queued", "recorded": "recorded", "dropped": "dropped", "fallbacks": "fell back", "shadowed": "shadowed",
}  # fmt: skip
_FORMS: dict[str, type] = {
    "mode": str, "art_patch": str, "instrumented": list, "degraded": list, "bypasses": dict, "open_breakers": list,
    "breakers_open_since": dict,
    **dict.fromkeys(_COUNTS, int),
}  # fmt: skip


@command
def status(
    project: Project,
    prometheus: Annotated[bool, Option("Print text that Prometheus can read.")] = False,
    to: Annotated[
        Path | None, Option("With --prometheus: write it to this file, whole or not at all.", name="output")
    ] = None,
) -> None:
    """Show how much is recorded, which policy serves, what the app processes report, and the newest decisions."""
    if prometheus and project.as_json:
        raise ConfigError("--prometheus and --json are two forms of one answer; leave one out")
    if to is not None and not prometheus:
        raise ConfigError("--output is for the text of --prometheus; add --prometheus, or leave it out")
    if prometheus:
        return _print_metrics(project, to)
    with project.opened() as (settings, opened):
        facts = insights.project_status(settings, opened)
    if not project.answered(facts):
        _print_status(facts)


def _print_status(facts: dict[str, Any]) -> None:
    console, recorded, engine, now = output.stdout(), facts["recorded"], facts["engine"], time.time()
    table = output.grid("dim", "")
    last = f", last {output.ago(now - recorded['last_call_at'])} ago" if recorded["last_call_at"] else ""
    served = f"{recorded['calls_by_policy']} by our policies, {recorded['calls_fell_back']} fell back"
    if recorded["calls_engine_full"]:
        served += f" ({recorded['calls_engine_full']} because the engine was full)"
    health = "healthy" if engine["healthy"] else "[red]not reachable[/]: calls go upstream"
    # An engine may be up and still lack the champion; apps send no call there then.
    if engine["healthy"] and facts["champion"] not in (None, *engine["models"]):
        health = f"[red]does not have {facts['champion']} loaded[/]: calls go upstream"
    mode = f"canary, {facts['canary_percent']:g} % of the sessions" if facts["mode"] == "canary" else facts["mode"]
    rows = [
        ("project", facts["project"]),
        ("store", facts["store"]),
        ("mode", mode),
        ("champion", f"[b]{facts['champion']}[/]" if facts["champion"] else _no_champion(facts)),
        ("engine", f"{engine['base_url']} {health}" if engine["base_url"] else "none running; start `art-patch serve`"),
        ("calls", f"{recorded['calls']} ({served}, {recorded['calls_not_ok']} not ok{last})"),
        ("trainable", f"{recorded['calls_trainable']} calls"),
        ("trajectories", f"{recorded['trajectories']} in {recorded['scenarios']} grouped scenarios"),
        ("groups", output.listed([f"{count} {state}" for state, count in recorded["groups"].items()], "none yet")),
    ]
    standing_by = [each for each in facts["servers"] if each["state"] in ("stands by", "leaving")]
    for each in reversed(standing_by):
        rows.insert(
            5, ("leaving" if each["state"] == "leaving" else "stands by", _stands_by(each, facts["champion"], now))
        )
    if (tested := facts["challenger"]) is not None:
        rows.insert(4, ("challenger", _tested(tested, now)))
    if (learner := facts["learner"]) is not None:
        rows.insert(4, ("learner", f"[b]{learner['policy']}[/] {pipeline.what_is_missing(learner)}"))
    if facts["control_since"] is not None:
        rows.insert(4, ("control group", _control(facts, now)))
    if (change := facts["upstream_change"]) is not None:
        said = output.changed(types.UpstreamChange(**change))
        rows.append(("upstream", output.escape(f"{said}; earlier evidence is not used")))
    if recorded["calls_shadow"]:
        rows.append(("shadow", f"{recorded['calls_shadow']} calls asked in the background, beside the above"))
    if recorded["calls_resampled"]:
        rows.append(("re-sampled", f"{recorded['calls_resampled']} answers of our own beside the above"))
    if (judge := recorded["judge"])["calls"]:
        rows.append(("judge", _spent(judge)))
    if (differ := facts["disagreement"])["pairs"]:
        rows.append(("people", _differ(differ)))
    for name, value in rows:
        table.add_row(name, str(value))
    for reason, count in recorded["not_learned_from"].items():
        table.add_row("", f"[dim]{count} runs not learned from: {reason}[/]")
    for reason, count in recorded["untrainable"].items():
        table.add_row("", f"[dim]{count} not trainable: {reason}[/]")
    for reason, count in recorded["fell_back"].items():
        table.add_row("", output.cell(f"{count} fell back: {reason}", "dim"))
    console.print(table)
    if facts["apps"]:
        _print_apps(facts["apps"], now)
    if facts["history"]:
        _print_moves(facts["history"], now)


def _print_moves(moves: Sequence[types.JSON], now: float) -> None:
    console, ages = output.stdout(), [f"{output.ago(now - move['at'])} ago" for move in moves]
    when, name = max(map(len, ages)), max(len(move["policy"]) for move in moves)
    console.print()
    for at, move in zip(ages, moves, strict=True):
        console.print(output.Text(f"{at:>{when}}  {move['policy']:{name}}  became {move['to_state']}"))
        # Two lines of 80 columns: reasons of a gate fill a screen, and `art-patch history` has them whole.
        why = output.one_line(f"by {move['who']}: {move['reason']}")
        output.print_below(console, shorten(why, 150, placeholder=" ..."))


def _stands_by(server: dict[str, Any], champion: str | None, now: float) -> str:
    health = "healthy" if server["healthy"] else "[red]not reachable[/]"
    if server["healthy"] and champion not in (None, *server["models"]):
        health = f"[yellow]loads {champion}[/]"
    return f"{server['base_url']} {health}, started {output.ago(now - server['since'])} ago"


def _no_champion(facts: dict[str, Any]) -> str:
    if facts["learner"] is not None:
        return "learning, upstream answers"
    return "upstream, beside the canary" if facts["challenger"] is not None else "none: calls go upstream"


def _control(facts: dict[str, Any], now: float) -> str:
    look, since = facts["control_look"], facts["control_since"]
    when = f"{datetime.fromtimestamp(since):%Y-%m-%d %H:%M}, {output.ago(now - since)} ago"
    told = "not compared yet"
    if look:
        told = f"compared {output.ago(now - look['at'])} ago: {promotion.look_in_words(look)}"
    return f"{facts['control_percent']:g} % of the sessions stay with upstream since {when}; {told}"


def _tested(challenger: dict[str, Any], now: float) -> str:
    share = "asked in the background" if challenger["percent"] is None else f"{challenger['percent']:g} % of sessions"
    return f"[b]{challenger['policy']}[/] {challenger['state']}, {share}, for {output.ago(now - challenger['since'])}"


def _spent(judge: dict[str, Any]) -> str:
    unpriced = f", and {judge['unpriced']} calls of unknown price" if judge["unpriced"] else ""
    tokens = judge["prompt_tokens"] + judge["completion_tokens"]
    return f"{judge['calls']} calls, {tokens:,} tokens, ${judge['cost_usd']:.2f}{unpriced}"


def _differ(metrics: dict[str, Any]) -> str:
    tied = f", sees no difference in {metrics['tied']}" if metrics["tied"] else ""
    return (
        f"the judge orders {metrics['against']} of {metrics['pairs']} sibling pairs ({metrics['share']:.0%}) "
        f"the other way round than they do{tied}"
    )


def _well_formed(app: dict[str, Any]) -> dict[str, Any]:
    """Return what an app process said, as far as it has the form: other releases say less, or something else."""
    kept: dict[str, Any] = {key: value for key, value in app.items() if isinstance(value, _FORMS.get(key, object))}
    kept = {"mode": "", "instrumented": [], "degraded": [], "bypasses": {}} | kept
    lists = {key: list(map(str, kept[key])) for key in ("instrumented", "degraded")}
    counts = {name: count for name, count in kept["bypasses"].items() if isinstance(count, int)}
    return kept | lists | {"bypasses": counts}


def _open_breakers(live: Sequence[dict[str, Any]], now: float) -> Iterator[str]:
    """Yield a line for each circuit breaker that is open in app processes that run: in how many, and since when."""
    for name in ("engine", "challenger"):
        its = [app for app in live if name in app.get("open_breakers", [])]
        # Apps of earlier releases do not tell when.
        told = (app.get("breakers_open_since", {}).get(name) for app in its)
        known = [min(at, now) for at in told if isinstance(at, int | float) and at > 0]  # clocks differ
        since = ""
        if known:
            since = f" since {datetime.fromtimestamp(min(known)):%Y-%m-%d %H:%M:%S}, {output.ago(now - min(known))} ago"
        if its:
            where = f"{len(its)} of {output.counted(len(live), 'app process', 'app processes')}"
            yield f"circuit breaker of the {name}: open in {where}{since}"


def _print_apps(apps: list[dict[str, Any]], now: float) -> None:
    apps = list(map(_well_formed, apps))
    live = [app for app in apps if now - app["at"] < store.APPS_LIVE_S]
    shown, others = live[:_MOST_APPS], live[_MOST_APPS:] + [app for app in apps if app not in live]
    output.stdout().print()
    if shown:
        counts = [key for key in _COUNTS if key == "recorded" or any(app.get(key) for app in shown)]
        names = [_COUNTS[key] for key in counts]
        table = output.table("app process", "last seen", "release", "mode", *names, right=names, padding=(0, 2, 0, 0))
        for app in shown:
            # Apps of earlier releases do not tell all of it.
            release, numbers = app.get("art_patch", ""), (app.get(key, 0) for key in counts)
            words = (app["id"], f"{output.ago(now - app['at'])} ago", release, app["mode"], *numbers)
            table.add_row(*map(output.cell, words))
        output.stdout().print(table)
    if others:
        many = output.counted(len(others), "app process", "app processes")
        sums = ", ".join(
            f"{sum(app.get(key, 0) for app in others)} {name}" for key, name in _COUNTS.items() if key != "queued"
        )
        output.say(f"{many} {'more ' if shown else ''}in the last hour, most of them ended: {sums}", style="dim")
    for line in _open_breakers(live, now):
        output.stdout().print(output.Text(line, "yellow"))
    # By what they say: hundreds of short processes say the same.
    said: dict[str, list[str]] = {}
    passed: Counter[str] = Counter()
    for app in apps:
        passed.update(app["bypasses"])
        for sentence in (f"sees {output.listed(app['instrumented'], 'nothing yet')}", *app["degraded"]):
            said.setdefault(sentence, []).append(app["id"])
    for sentence, ids in said.items():
        who = ids[0] if len(ids) == 1 else f"{len(ids)} processes"
        output.say(f"{who}: {output.one_line(sentence)}", style="dim" if sentence.startswith("sees ") else "yellow")
    for name, count in passed.items():
        output.say(f"{count} calls went past the patch by {output.one_line(name)}", style="yellow")


def _print_metrics(project: Project, to: Path | None) -> None:
    with extra("--prometheus", "metrics"):
        from art_patch.metrics import gather
    with project.opened() as (settings, opened):
        text = gather(settings, opened).text()
    if to is None:
        # Without a newline of our own: the text format ends with one.
        typer.echo(text, nl=False)
        return
    try:
        # Prometheus' node_exporter, which reads the file, is another user.
        with replacing(to.absolute(), mode=0o644) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{to} cannot be written ({error.strerror}); name a file in a directory that exists"
        ) from None


@command
def mode(
    project: ActingProject,
    wait: Wait,
    dry: DryRun,
    value: Annotated[
        str | None, typer.Argument(help="off, record, shadow, canary, route, or auto: each app's own setting.")
    ] = None,
    percent: Annotated[
        float | None,
        Option("Share of the sessions in mode canary, in percent. Default: the apps' own, 5.", least=0, most=100),
    ] = None,
    control: Annotated[
        float | None,
        Option(
            "Share of the sessions that stay with upstream, so that the champion is compared with it for good, in "
            "percent.",
            least=0,
            most=50,
        ),
    ] = None,
) -> None:
    """Set the mode of every running app of the project, or its control group, without a restart."""
    modes = get_args(types.Mode)
    if value not in (*modes, "auto", None):
        raise ConfigError(f"mode {value!r} is not one of {', '.join(modes)}, auto")
    if value is None and control is None:
        raise ConfigError(f"give a mode ({', '.join(modes)}, auto), or --control PERCENT")
    if percent is not None and value != "canary":
        raise ConfigError("--percent goes with mode canary only")
    # `None` deletes the mode from the store, so that each app's own setting counts again.
    chosen = None if value == "auto" else cast("types.Mode", value)
    with project.opened() as (settings, opened):
        if value is not None and not dry.dry_run:
            opened.ledger.set_mode(chosen, canary_percent=percent, who=project.actor("mode"))
        if control is not None and not dry.dry_run:
            opened.ledger.set_control_group(control, who=project.actor("mode"))
        route, following = opened.ledger.route(), followed(opened, settings, wait=wait, dry=dry)
    facts = {
        "project": settings.project,
        "mode": value or route.mode or "auto",
        "canary_percent": percent,
        "control_percent": route.control_percent if control is None else control,
    } | following.facts()
    if not project.answered(facts):
        share = "" if percent is None else f" with {percent:g} % of the sessions"
        # In other modes, and without a champion, no session leaves upstream: the share says nothing but what was set.
        leaves = route.champion and facts["mode"] in ("canary", "route", "auto")
        if facts["control_percent"] and (control is not None or leaves):
            share += f"; {facts['control_percent']:g} % of the sessions stay with upstream"
        said = f"{dry.head}mode of [b]{settings.project}[/]: {facts['mode']}{share}; {following.words()}"
        output.stdout().print(said, soft_wrap=True)
    following.end()


@command
def config(context: typer.Context, project: Project) -> None:
    """Show every setting with its value and its origin: default, environment, env file, argument, or store.

    A setting that holds a key or a password is only said to be set. A mode in the store wins over the setting, in
    running apps, too. An app's own arguments of `patch()` are not known here.
    """
    settings = project.settings()
    arguments = [name for name in Settings.model_fields if given_on_the_command_line(context, name)]
    mode, unread = None, None
    try:
        with project.opened() as (_, opened):
            mode = opened.ledger.route().mode
    except ArtPatchError as error:  # what is set can be looked at while the database is down
        unread = output.one_line(error)
    found = insights.settings_in_force(settings, arguments, os.environ, env_file=FROM_ENV_FILE, mode=mode)
    if project.answered({"project": settings.project, "settings": found, "store_unread": unread}):
        return
    table = output.table("setting", "origin", "value", whole=("setting", "origin"))
    for name, one in found.items():
        style = "" if one["source"] == "default" else "bold"
        value = "-" if one["value"] is None else one["value"]
        table.add_row(output.Text(name, style), output.Text(one["source"], style), output.cell(value, style))
    output.stdout().print(table)
    if unread is not None:
        output.say(f"what the store sets is not known: {unread}", style="dim")


_MARKS = {"ok": "[green]●[/]", "warn": "[yellow]●[/]", "bad": "[red]●[/]", "unknown": "[dim]○[/]"}


@command
def doctor(
    context: typer.Context,
    project: Project,
    mode: Annotated[str | None, setting("mode")] = None,
    base_url: Annotated[str | None, setting("base_url")] = None,
    base: Annotated[str | None, Option("Forecast what of this base model fits on one GPU: a directory or id.")] = None,
    gpu_memory: Annotated[float | None, Option("With --base: memory of the GPU in GiB.", least=1.0)] = None,
) -> None:
    """Check SDK, settings, store, engine, adapter, vLLM and judge, and print a cure for each problem.

    Run it in the app's Python environment and with the app's environment variables. With --base and --gpu-memory
    nothing is checked: the memory that serving and training need is forecast from the base's configuration alone.

    Exit codes: 0 no finding is red; 1 a finding is red, or the base can be neither served nor trained on this GPU; 2
    one of --base and --gpu-memory is missing; 9 there is no such base.
    """
    if base is not None or gpu_memory is not None:
        return show_forecast(project, base, gpu_memory)
    names = ("project", "home", "store", "mode", "base_url")
    # A value that came from a variable is left to `read_settings`, so that findings can name the variable.
    given = {name: context.params[name] for name in names if given_on_the_command_line(context, name)}
    chosen, wrong = read_settings(**given)
    of_options = variables_of(context.find_root().command)
    findings, settings = examinations.examine(chosen, given.keys(), of_options=of_options, wrong=wrong)
    healthy = all(finding.level != "bad" for finding in findings)
    facts = {"healthy": healthy, "findings": [asdict(one) for one in findings], "settings": settings}
    if not project.answered(facts):
        _print_findings(findings)
    if not healthy:
        raise typer.Exit(1)


def _print_findings(findings: list[examinations.Finding]) -> None:
    console = output.stdout()
    table = output.Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, several in groupby(findings, key=attrgetter("name")):
        for index, finding in enumerate(several):
            table.add_row(_MARKS[finding.level], "" if index else name, output.cell(finding.text))
            if finding.cure:
                table.add_row("", "", output.cell(f"-> {finding.cure}"))
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    red = f"[red]{counts['bad']} red[/]" if counts["bad"] else "nothing red"
    unknown = f", {counts['unknown']} unknown" if counts["unknown"] else ""
    console.print(f"\n{red}, {counts['warn']} yellow, {counts['ok']} green{unknown}")
