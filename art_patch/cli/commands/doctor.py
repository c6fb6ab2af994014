"""`art-patch doctor`: what works, what does not, and the cure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from art_patch.cli.options.shared import BaseUrlOption, HomeOption, JsonOption, ModeOption, ProjectOption, StoreOption

if TYPE_CHECKING:
    from art_patch.doctor import Finding


def doctor(
    context: typer.Context,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    mode: ModeOption = None,
    base_url: BaseUrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at SDK, settings, store, engine, adapter, vLLM and judge, and say what to do.

    Run it in the app's environment.
    Exit codes: 0 nothing is red; 1 something is.
    """
    from dataclasses import asdict

    from art_patch.cli.views.output import answer
    from art_patch.doctor import examine
    from art_patch.settings import read_settings

    options: dict[str, Any] = {
        "project": project,
        "home": home,
        "store": store,
        "mode": mode,
        "base_url": base_url,
    }
    given = {name: value for name, value in options.items() if _on_the_command_line(context, name)}
    chosen, wrong = read_settings(**given)
    findings, settings = examine(chosen, given.keys(), wrong=wrong)
    healthy = all(finding.level != "bad" for finding in findings)
    if as_json:
        answer({"healthy": healthy, "findings": [asdict(finding) for finding in findings], "settings": settings})
    else:
        _print(findings)
    if not healthy:
        raise typer.Exit(1)


def _on_the_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


_MARKS = {"ok": "[green]●[/]", "warn": "[yellow]●[/]", "bad": "[red]●[/]"}


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from art_patch.cli.views.output import stdout

    console = stdout()
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    before = None
    for finding in findings:
        name = "" if finding.name == before else finding.name
        table.add_row(_MARKS[finding.level], name, escape(finding.text))
        if finding.cure:
            table.add_row("", "", f"[b]->[/] {escape(finding.cure)}")
        before = finding.name
    console.print(table)
    counts = {level: sum(finding.level == level for finding in findings) for level in _MARKS}
    red = f"[red]{counts['bad']} red[/]" if counts["bad"] else "nothing red"
    console.print(f"\n{red}, {counts['warn']} yellow, {counts['ok']} green")
