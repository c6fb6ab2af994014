"""`art-patch store verify | stats | vacuum | backup | prune`: looking after the database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

_DAY_S = 86_400.0


def verify(
    project: ProjectOption = None, home: HomeOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Prove the store sound: every row, every message's hash, the audit chain. Reads all of it.

    Exit codes: 0 sound; 8 not.
    """
    from art_patch.cli.views.output import answer, stdout
    from art_patch.errors import StoreError

    with opened_store(project=project, home=home, store=store) as (_, opened):
        found = opened.verify()
        calls = opened.read.counts()["calls"]
    if as_json:
        answer({"sound": not found, "found": found})
    elif not found:
        stdout().print(f"sound: nothing is missing, and nothing was altered ({calls} calls)")
    else:
        console = stdout()
        console.print("[red]not sound[/]:")
        for line in found:
            console.print(f"  {line}", markup=False, soft_wrap=True)
        console.print("-> `art-patch store backup` keeps what is readable; then restore a backup that is sound")
    if found:
        raise typer.Exit(StoreError.exit_code)


def stats(
    project: ProjectOption = None, home: HomeOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Rows and bytes of each table, and what a trajectory costs."""
    from dataclasses import asdict

    from art_patch.cli.views.output import answer

    with opened_store(project=project, home=home, store=store) as (_, opened):
        metrics = asdict(opened.maintain.stats())
    answer(metrics) if as_json else _print(metrics)


def vacuum(
    project: ProjectOption = None, home: HomeOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Delete what nothing refers to, and give the space back to the disk.

    Writers wait while the file is written anew, about a second for each 100 MiB; apps queue their calls meanwhile.
    Needs free disk space of twice the file's size.
    """
    from dataclasses import asdict

    from art_patch.cli.views.output import answer, stdout

    with opened_store(project=project, home=home, store=store) as (_, opened):
        done = opened.maintain.vacuum()
    if as_json:
        answer(asdict(done))
        return
    orphans = [
        f"{count} {name}"
        for count, name in ((done.messages, "messages"), (done.blocks, "blocks of ids"), (done.tools, "lists of tools"))
        if count
    ]
    gone = f"deleted {', '.join(orphans)} that nothing referred to" if orphans else "nothing was left over"
    stdout().print(f"{gone}; {_size(done.bytes_before)} before, {_size(done.bytes_after)} now")


def backup(
    file: Annotated[Path, typer.Argument(help="Where to; must not exist.", show_default=False)],
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy the store while apps go on writing. The copy is checked, and readable by you alone.

    Restore: stop the apps, move the copy to the store's path, delete what lies beside it ending in -wal and -shm.
    """
    from art_patch.cli.views.output import answer, stdout

    with opened_store(project=project, home=home, store=store) as (_, opened):
        size = opened.maintain.backup(file.absolute())
    if as_json:
        answer({"path": str(file.absolute()), "bytes": size})
    else:
        stdout().print(f"{file.absolute()}: {_size(size)}, checked", markup=False, soft_wrap=True)


def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Delete what is older: 90d, 12h.", show_default=False)
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", help="Keep no more than the newest N.", min=0, show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete old trajectories, while apps go on. Those that wait for training are no exception.

    Without options: what ART_PATCH_KEEP_DAYS and ART_PATCH_KEEP_TRAJECTORIES say, as `art-patch retrain` does each
    time.
    """
    from dataclasses import asdict

    from art_patch.cli.options.asking import ask, seconds
    from art_patch.cli.views.output import answer, bars, stdout
    from art_patch.errors import ConfigError
    from art_patch.settings import load_settings

    age = None if older_than is None else seconds(older_than)
    if age is None and keep is None:
        settings = load_settings(project=project, home=home, store=store)
        age = None if settings.keep_days is None else settings.keep_days * _DAY_S
        keep = settings.keep_trajectories
    if age is None and keep is None:
        raise ConfigError("say what to keep: --older-than 90d, --keep 10000, or ART_PATCH_KEEP_DAYS=90")
    limits: dict[str, Any] = {"older_than_s": age, "keep": keep}
    with opened_store(project=project, home=home, store=store) as (_, opened):
        done = opened.rights.prune(**limits, dry_run=True)
        if done.trajectories and not dry_run:
            if not ask(f"{done.trajectories} trajectories with {done.calls} calls. Delete them?", yes=yes):
                stdout().print("nothing was deleted")
                return
            with bars(quiet=as_json) as progress:
                done = opened.rights.prune(
                    **limits,
                    who=who_am_i(who, "store prune"),
                    progress=lambda finished, total: progress("prune", finished, total),
                )
    if as_json:
        answer(asdict(done))
    elif not done.trajectories:
        stdout().print("nothing is that old")
    else:
        verb = "would delete" if done.dry_run else "deleted"
        messages = "" if done.messages is None else f", {done.messages} messages"
        dead = f"; {done.dead_groups} groups that waited for training are dead" if done.dead_groups else ""
        stdout().print(f"{verb} {done.trajectories} trajectories, {done.calls} calls{messages}{dead}")


def _print(metrics: dict[str, Any]) -> None:
    import time

    from rich.table import Table

    from art_patch.cli.views.output import ago, stdout

    console, now = stdout(), time.time()
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("table")
    for column in ("rows", "bytes"):
        table.add_column(column, justify="right")
    for name, one in sorted(metrics["tables"].items(), key=lambda item: -(item[1]["bytes"] or 0)):
        if one["rows"]:
            table.add_row(name, f"{one['rows']:,}", "" if one["bytes"] is None else _size(one["bytes"]))
    console.print(table)
    free = f", {_size(metrics['free_bytes'])} of it free" if metrics["free_bytes"] else ""
    lines = [f"file {_size(metrics['bytes'])}{free}; log {_size(metrics['wal_bytes'])}"]
    if metrics["kib_per_trajectory"]:
        lines.append(f"{metrics['trajectories']:,} trajectories, {metrics['kib_per_trajectory']:,.1f} KiB each")
    if metrics["compression"]:
        lines.append(f"messages are kept in {100 / metrics['compression']:.0f} % of their text's bytes")
    if metrics["first_call_at"]:
        first, last = (ago(now - metrics[key]) for key in ("first_call_at", "last_call_at"))
        lines.append(f"first call {first} ago, last {last} ago")
    console.print()
    for line in lines:
        console.print(line)


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
