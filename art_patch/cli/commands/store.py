"""`art-patch store verify | stats | vacuum | backup | prune | grant`, `art-patch projects` and `art-patch erase`."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch import insights, store
from art_patch._lib import words
from art_patch._lib.words import duration_s
from art_patch.cli import output
from art_patch.cli.options import ActingProject, Project
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ArtPatchError, ConfigError, StoreError

_DAY_S = 86_400.0


@command
def verify(project: Project) -> None:
    """Check that the whole store is undamaged: the rows, message hashes and audit logs of all its projects.

    Exit codes: 0 the store is sound; 8 it is not.
    """
    with project.opened() as (_, opened):
        found = opened.verify()
        calls = opened.maintain.stats().tables["calls"].rows
    as_json = project.answered({"sound": not found, "found": found})
    if found and not as_json:
        output.stdout().print("[red]not sound[/]:")
        for line in found:
            output.say(f"  {line}")
        output.say("-> `art-patch store backup` keeps what is readable; then restore a backup that is sound")
    elif not as_json:
        output.stdout().print(f"sound: nothing is missing, and nothing was altered ({calls} calls)")
    # After the answer, so that --json prints it in both cases.
    if found:
        raise typer.Exit(StoreError.exit_code)


@command
def stats(project: Project) -> None:
    """Show the rows and bytes of each table, with all projects of the store, and the average bytes of a trajectory."""
    with project.opened() as (_, opened):
        metrics = asdict(opened.maintain.stats())
    if not project.answered(metrics):
        _print_stats(metrics)


@command
def vacuum(project: Project) -> None:
    """Delete rows of this project that no other row refers to, and return the space of the whole store to the disk.

    The database file is rewritten with all its projects, which needs free disk space of twice its size. During that
    time nothing can be written to it, about one second for each 100 MiB; running apps keep their calls in memory until
    it is done.
    """
    with project.opened() as (_, opened):
        done = opened.maintain.vacuum()
    if project.answered(asdict(done)):
        return
    found = ((done.messages, "messages"), (done.blocks, "blocks of ids"), (done.tools, "lists of tools"))
    orphans = [f"{count} {name}" for count, name in found if count]
    gone = f"deleted {', '.join(orphans)} that nothing referred to" if orphans else "nothing was left over"
    output.stdout().print(f"{gone}; {words.size(done.bytes_before)} before, {words.size(done.bytes_after)} now")


@command
def backup(
    file: Annotated[Path, typer.Argument(help="File to write; it must not exist.", show_default=False)],
    project: Project,
) -> None:
    """Copy the store, with all its projects, while apps go on writing. The copy is checked; only you can read it.

    To restore: stop the apps, move the copy to the store's path, and delete the files beside it that end in -wal and
    -shm.
    """
    with project.opened() as (_, opened):
        size = opened.maintain.backup(file.absolute())
    if not project.answered({"path": str(file.absolute()), "bytes": size}):
        output.say(f"{file.absolute()}: {words.size(size)}, checked")


@command
def grant(
    role: Annotated[str, typer.Argument(help="PostgreSQL role that the project's apps log in as.", show_default=False)],
    project: Project,
) -> None:
    """Print SQL that limits a PostgreSQL role to the rows of this project. The owner of the tables runs it with psql.

    The role then reads and changes nothing of other projects, whatever SQL it sends. After the first grant, roles that
    are not the owner and were granted no project see no rows.
    """
    with project.opened() as (_, opened):
        sql = opened.maintain.sql_for_role(role)
    if not project.answered({"sql": sql}):
        typer.echo(sql)


@command
def projects(place: Project) -> None:
    """List all projects of the store, or without --store of every store in the home directory, and who serves them."""
    settings = place.settings()
    urls = [settings.store_url] if settings.store else []
    for path in () if urls else sorted(settings.directory.parent.glob(f"*/{store.DEFAULT_NAME}")):
        urls += [f"sqlite:///{path}"] if path.stat().st_size else []
    found, failed = list[dict[str, Any]](), list[ArtPatchError]()
    for url in urls:
        try:
            with closing(store.open_store(url, create=False)) as opened:
                its = opened.maintain.projects(seen_since=time.time() - insights.APPS_SEEN_S)
            found += [{"store": store.without_password(url), **one} for one in its]
        except ArtPatchError as error:
            failed.append(error)
    if not place.answered({"projects": found, "unreadable": list(map(str, failed))}):
        table, now = output.table("project", "champion", "engine", "mode", "apps", "calls", "last call"), time.time()
        for one in found:
            last = "" if one["last_call_at"] is None else f"{output.ago(now - one['last_call_at'])} ago"
            facts = [one["champion"] or "none", one["engine"] or "none", one["mode"] or "", str(one["apps"])]
            table.add_row(*map(output.one_line, (one["project"] or "(no name yet)", *facts, str(one["calls"]), last)))
        output.stdout().print(table)
        for error in failed:
            output.fail(error, as_json=False)
    if failed:
        raise typer.Exit(failed[0].exit_code)


DRY_RUN = Option("Print what would be deleted, and delete nothing.")
YES = Option("Delete without asking.")


@command
def prune(
    project: ActingProject,
    older_than: Annotated[str | None, Option("Delete trajectories older than this: 90d, 12h.")] = None,
    keep: Annotated[int | None, Option("Keep only this number of trajectories, the newest ones.", least=0)] = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    yes: Annotated[bool, YES] = False,
) -> None:
    """Delete old trajectories, even those that wait for training. Apps may run meanwhile.

    Without --older-than and --keep, the settings ART_PATCH_KEEP_DAYS and ART_PATCH_KEEP_TRAJECTORIES say what is
    deleted. `art-patch retrain` deletes by the same settings at the end of each cycle.
    """
    age = None if older_than is None else duration_s(older_than)
    if older_than is not None and age is None:
        raise ConfigError(f"{older_than!r} is no duration; write a number and s, min, h, d or w, like 90d")
    if age is None and keep is None:
        settings = project.settings()
        age = None if settings.keep_days is None else settings.keep_days * _DAY_S
        keep = settings.keep_trajectories
    if age is None and keep is None:
        raise ConfigError("say what to keep: --older-than 90d, --keep 10000, or ART_PATCH_KEEP_DAYS=90")
    with project.opened() as (_, opened):
        run = partial(opened.rights.prune, older_than_s=age, keep=keep)
        done = run(dry_run=True)  # first only counted, for the question
        if done.trajectories and not dry_run:
            if not output.confirmed(f"{done.trajectories} trajectories with {done.calls} calls. Delete them?", yes=yes):
                output.stdout().print("nothing was deleted")
                return
            with output.bars(quiet=project.as_json) as progress:
                done = run(who=project.actor("store prune"), progress=progress.counts("prune"))
    if project.answered(asdict(done)):
        return
    verb = "would delete" if done.dry_run else "deleted"
    messages = "" if done.messages is None else f", {done.messages} messages"
    dead = f"; {done.dead_groups} groups that waited for training are dead" if done.dead_groups else ""
    words = f"{verb} {done.trajectories} trajectories, {done.calls} calls{messages}{dead}"
    output.stdout().print(words if done.trajectories else "nothing is that old")


def _print_stats(metrics: dict[str, Any]) -> None:
    console, now = output.stdout(), time.time()
    table = output.table("table", "rows", "bytes", right=("rows", "bytes"))
    for name, one in sorted(metrics["tables"].items(), key=lambda item: -(item[1]["bytes"] or 0)):
        if one["rows"]:
            table.add_row(name, f"{one['rows']:,}", "" if one["bytes"] is None else words.size(one["bytes"]))
    console.print(table)
    free = f", {words.size(metrics['free_bytes'])} of it free" if metrics["free_bytes"] else ""
    lines = [f"file {words.size(metrics['bytes'])}{free}; log {words.size(metrics['wal_bytes'])}"]
    if metrics["kib_per_trajectory"]:
        lines.append(f"{metrics['trajectories']:,} trajectories, {metrics['kib_per_trajectory']:,.1f} KiB each")
    if metrics["compression"]:
        lines.append(f"messages are kept in {100 / metrics['compression']:.0f} % of their text's bytes")
    if metrics["first_call_at"]:
        first, last = (output.ago(now - metrics[key]) for key in ("first_call_at", "last_call_at"))
        lines.append(f"first call {first} ago, last {last} ago")
    console.print()
    for line in lines:
        console.print(line)


# --- erase ---


@command
def erase(
    project: ActingProject,
    user: Annotated[str | None, Option("Erase the trajectories of this user_id.")] = None,
    session: Annotated[str | None, Option("Erase the trajectories of this session_id.")] = None,
    trajectory: Annotated[str | None, Option("Erase the trajectory with this id.")] = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    yes: Annotated[bool, YES] = False,
) -> None:
    """Delete the recorded data of a user, a session or a trajectory. Apps may run meanwhile.

    A message that other trajectories also contain is kept for those. Run the command again if it was interrupted.
    Exported files, backups and policies that were trained on the data are not changed or deleted; the command lists
    them and says what to do.
    """
    with project.opened() as (settings, opened):
        run = partial(insights.erase, settings, opened, user=user, session=session, trajectory=trajectory)
        # First only counted, for the question; it also refuses more than one subject.
        done = run(dry_run=True)
        if not dry_run:
            # Without a row there is nothing to ask about; what apps have not written yet is kept out.
            if done.erasure.found and not output.confirmed(f"{done.sentence}. Delete it?", yes=yes):
                output.stdout().print("nothing was deleted")
                return
            with output.bars(quiet=project.as_json) as progress:
                done = run(who=project.actor("erase"), progress=progress.counts("erase"))
    if project.answered(done.facts()):
        return
    for line in done.lines(now=time.time()):
        output.say(line)
