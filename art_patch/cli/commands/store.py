"""`art-patch store verify | stats | vacuum | backup | prune | grant`, `art-patch projects` and `art-patch erase`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from art_patch import insights, pipeline, store
from art_patch._lib import words
from art_patch.cli import output
from art_patch.cli.options import ActingProject, Project, duration_s
from art_patch.cli.output import counted
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ArtPatchError, ConfigError, StoreError
from art_patch.types import CHALLENGERS, JSON, Policy

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
        subject = {"user": user, "session": session, "trajectory": trajectory}
        run = partial(opened.rights.erase, user=user, session=session, trajectory=trajectory)
        erasure = run(dry_run=True)  # first only counted, for the question; it also refuses more than one subject
        policies = opened.ledger.policies()
        ((what, value),) = [(key, one) for key, one in subject.items() if one is not None]
        whose = f"{what} {value}"
        if not dry_run:
            # Without a row there is nothing to ask about; what apps have not written yet is kept out.
            if erasure.found and not output.confirmed(f"{_sentence(erasure, whose)}. Delete it?", yes=yes):
                output.stdout().print("nothing was deleted")
                return
            with output.bars(quiet=project.as_json) as progress:
                erasure = run(who=project.actor("erase"), progress=progress.counts("erase"))
        # What the store cannot undo by itself: copies outside it, and weights.
        copies = opened.transfers.copies_of([one.name for one in erasure.policies])
        todo = advice(erasure, policies, settings.project, champions=opened.ledger.champions(), copied=bool(copies))
    names = [one.name for one in policies]
    if erasure.found and not dry_run and not pipeline.forget_unfinished(settings.directory, names):
        todo.append(
            "A cycle is at work, or `reproduce`; if it trains, its copy of the data is deleted when it has ended."
        )
    facts = asdict(erasure) | {"found": erasure.found, "subject": {what: value}, "policy_copies": copies, "todo": todo}
    if project.answered(facts):
        return
    for line in _lines(erasure, whose, copies, todo):
        output.say(line)


def advice(
    erasure: store.Erasure, policies: tuple[Policy, ...], project: str, *, champions: Sequence[str] = (),
    copied: bool = False,
) -> list[str]:  # fmt: skip
    """Return what a person still has to do after an erasure, as sentences with the exact commands."""
    todo: list[str] = []
    if erasure.exports:
        todo.append("Delete these exports, and the copies that were made of them.")
    if copied:
        todo.append("Delete these copies of the policies, also where they were imported.")
    serving = next((one.name for one in erasure.policies if one.serves), None)
    tested = next((one for one in policies if one.state in CHALLENGERS), None)
    # The test also ends if the tested policy is clean and the champion is not: a rollback would reject it first.
    if tested is not None and (serving is not None or tested.name in {one.name for one in erasure.policies}):
        todo.append(f"{tested.name} is {tested.state}: end its test with `art-patch rollback --project {project}`.")
    if serving is not None:
        todo.append(f"A LoRA cannot forget, and {serving} serves. {_way_back(erasure, policies, champions, project)}")
    elif erasure.policies:
        todo.append("A LoRA cannot forget, but none of these serves, and the champion did not learn from it.")
    idle = [one.path for one in erasure.policies if one.path and not one.serves]
    if idle:
        todo.append(f"Delete the adapters that do not serve, so that nobody promotes them: `rm -r {shlex.join(idle)}`.")
    if erasure.found and not erasure.dry_run:
        todo.append("Backups that were made before hold it still.")
    if not erasure.scrubbed:
        todo.append("Somebody was reading the store, so its log holds some of it still. Run the same command again.")
    return todo


def _way_back(erasure: store.Erasure, policies: tuple[Policy, ...], champions: Sequence[str], project: str) -> str:
    """Return how to let a policy serve that did not learn from the data. The next cycle starts from that policy."""
    tainted = {one.name for one in erasure.policies}
    retired = {one.name for one in policies if one.state == "retired"} - tainted
    # One goes back only to a policy that has served; the newest of them has learned most.
    if not (clean := [name for name in champions if name in retired]):
        return "No earlier champion is free of it: begin anew from the base in another --project."
    back = f"Go back to {clean[-1]} with `art-patch rollback --to {clean[-1]} --project {project}`"
    return f"{back}; then `art-patch retrain --project {project}` trains from there, without it."


def _sentence(erasure: store.Erasure, whose: str) -> str:
    # The number of messages is unknown while other trajectories may share them with these.
    parts = ("calls", "messages", "scores", "spans", "corrections", "judgements")
    found = [counted(count, part.removesuffix("s"), part) for part in parts if (count := getattr(erasure, part))]
    if erasure.trajectories:
        found.insert(0, counted(erasure.trajectories, "trajectory", "trajectories"))
    return f"{whose}: {output.listed(found, 'nothing left but the end of an erasure that was cut short')}"


_HOW = {
    "trained": "trained on it",
    "descends": "descends from one that was",
    "copy": "an imported copy of one that was",
}


def _lines(erasure: store.Erasure, whose: str, copies: list[JSON], todo: list[str]) -> list[str]:
    if not erasure.found:
        late = "" if erasure.dry_run else "; what apps recorded of it and have not written yet is dropped"
        return [f"nothing is recorded of {whose}{late}"]
    now = time.time()
    verb, will = ("would erase", "would be") if erasure.dry_run else ("erased", "are")
    lines = [f"{verb} {_sentence(erasure, whose)}"]
    if erasure.messages is None and erasure.calls:
        lines.append("messages that other trajectories share stay")
    if erasure.groups:
        dead = f"; {len(erasure.dead_groups)} that waited for training {will} dead" if erasure.dead_groups else ""
        lines.append(f"{counted(len(erasure.groups), 'group', 'groups')} held some of it{dead}")
    if erasure.exports:
        lines.append(f"{counted(len(erasure.exports), 'export holds', 'exports hold')} some of it:")
        for one in erasure.exports:
            path = "stdout" if one.path == "-" else output.one_line(one.path)
            lines.append(f"  {path} ({one.format}, {output.ago(now - one.at)} ago, by {output.one_line(one.who)})")
    if erasure.policies:
        lines.append(f"{counted(len(erasure.policies), 'policy', 'policies')} learned from it:")
        for one in erasure.policies:
            lines.append(f"  {one.name} ({_HOW[one.how]}; {'serves now' if one.serves else one.state})")
    if copies:
        lines.append(f"{counted(len(copies), 'copy', 'copies')} of these policies left the project:")
        for each in copies:
            by = f"{output.ago(now - each['at'])} ago, by {output.one_line(each['who'])}"
            lines.append(f"  {each['policy']} to {output.one_line(each['to'])} ({by})")
    return [*lines, *(f"-> {one}" for one in todo)]
