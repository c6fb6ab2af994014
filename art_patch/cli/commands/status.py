"""`art-patch status` (counts and policies), `doctor` (checks of the setup), and `mode` (switches running apps)."""

from __future__ import annotations

import os
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from art_patch import doctor as examinations
from art_patch import insights, types
from art_patch._lib.atomic_files import replacing
from art_patch.cli import output
from art_patch.cli.followers import DryRun, Wait, followed
from art_patch.cli.options import FROM_ENV_FILE, ActingProject, Project, extra
from art_patch.cli.status_view import print_status
from art_patch.cli.typed_options import Option, command, given_on_the_command_line, setting, variables_of
from art_patch.errors import ArtPatchError, ConfigError
from art_patch.settings import Settings, read_settings


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
        print_status(facts)


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
) -> None:
    """Check SDK, settings, store, engine, adapter, vLLM and judge, and print a cure for each problem.

    Run it in the app's Python environment and with the app's environment variables.

    Exit codes: 0 no finding is red; 1 a finding is red.
    """
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
