"""`art-patch erase`: everything of a user, a session or a trajectory, and where copies of it live on."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Annotated

import typer

from art_patch.cli.options.opening import opened_store
from art_patch.cli.options.shared import HomeOption, JsonOption, ProjectOption, StoreOption, WhoOption, who_am_i

if TYPE_CHECKING:
    from art_patch.store import Erasure
    from art_patch.types import Policy


def erase(
    user: Annotated[str | None, typer.Option("--user", help="user_id of the trajectories.", show_default=False)] = None,
    session: Annotated[
        str | None, typer.Option("--session", help="session_id of the trajectories.", show_default=False)
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", help="Id of one trajectory.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    project: ProjectOption = None,
    home: HomeOption = None,
    store: StoreOption = None,
    who: WhoOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete what was recorded of somebody, while apps go on, and name what learned from it.

    Messages that other trajectories share stay theirs. Run it again if it was interrupted. Exports, backups and
    trained policies are not changed: they are listed, with what to do.
    """
    from dataclasses import asdict
    from functools import partial

    from art_patch.cli.options.asking import ask
    from art_patch.cli.views.output import answer, bars, stdout
    from art_patch.pipeline import forget_unfinished

    with opened_store(project=project, home=home, store=store) as (settings, opened):
        subject = {"user": user, "session": session, "trajectory": trajectory}
        run = partial(opened.rights.erase, user=user, session=session, trajectory=trajectory)
        erasure = run(dry_run=True)
        policies = opened.ledger.policies()
        ((what, value),) = [(key, one) for key, one in subject.items() if one is not None]
        whose = f"{what} {value}"
        if erasure.found and not dry_run:
            if not ask(f"{_sentence(erasure, whose)}. Delete it?", yes=yes):
                stdout().print("nothing was deleted")
                return
            with bars(quiet=as_json) as progress:
                erasure = run(
                    who=who_am_i(who, "erase"),
                    progress=lambda done, total: progress("erase", done, total),
                )
    todo = advice(erasure, policies, settings.project)
    if erasure.found and not dry_run and not forget_unfinished(settings.directory, [one.name for one in policies]):
        todo.append("A cycle is at work; if it trains, its copy of what it learns from is deleted when it has ended.")
    if as_json:
        answer(asdict(erasure) | {"found": erasure.found, "subject": {what: value}, "todo": todo})
        return
    console = stdout()
    for line in _lines(erasure, whose, todo):
        console.print(line, markup=False, soft_wrap=True)


def advice(erasure: Erasure, policies: tuple[Policy, ...], project: str) -> list[str]:
    """Return what is left for a person to do, in sentences with the exact commands."""
    from art_patch.types import CHALLENGERS

    todo: list[str] = []
    if erasure.exports:
        todo.append("Delete these exports, and the copies that were made of them.")
    if erasure.in_training:
        todo.append(
            "A cycle is training on some of it right now. When it has ended, do not promote its candidate: "
            "`art-patch status` names it."
        )
    serving = next((one.name for one in erasure.policies if one.serves), None)
    tested = next((one for one in policies if one.state in CHALLENGERS), None)
    # Also one that did not learn from it, where the champion did: a rollback gives up what is tested first.
    if tested is not None and (serving is not None or tested.name in {one.name for one in erasure.policies}):
        todo.append(f"{tested.name} is {tested.state}: end its test with `art-patch rollback --project {project}`.")
    if serving is not None:
        todo.append(f"A LoRA cannot forget, and {serving} serves. {_way_back(serving, erasure, policies, project)}")
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


def _way_back(serving: str, erasure: Erasure, policies: tuple[Policy, ...], project: str) -> str:
    """How to have a policy serve that did not learn from the data, so that the next cycle starts from that one."""
    tainted = {one.name for one in erasure.policies}
    champion = next(one for one in policies if one.name == serving)
    before = sorted((one for one in policies if one.state == "retired"), key=lambda one: one.step, reverse=True)
    older = [one for one in before if one.model == champion.model and one.step < champion.step]
    clean = [one.name for one in before if one.model == champion.model and one.name not in tainted]
    if older and older[0].name not in tainted:
        back = f"Go back to {older[0].name} with `art-patch rollback --project {project}`"
    elif clean:
        back = f"Go back to {clean[0]} with `art-patch promote {clean[0]} --project {project}`"
    else:
        return "No earlier policy is free of it: begin anew from the base in another --project."
    return f"{back}; then `art-patch retrain --project {project}` trains from there, without it."


def _sentence(erasure: Erasure, whose: str) -> str:
    counts = [
        _count(erasure.trajectories, "trajectory", "trajectories"),
        _count(erasure.calls, "call", "calls"),
        _count(erasure.scores, "score", "scores"),
        _count(erasure.spans, "span", "spans"),
        _count(erasure.corrections, "correction", "corrections"),
        _count(erasure.judgements, "judgement", "judgements"),
    ]
    if erasure.messages is not None:
        counts.insert(2, _count(erasure.messages, "message", "messages"))
    found = [count for count in counts if not count.startswith("0 ")]
    return f"{whose}: {', '.join(found) or 'nothing left but the end of an erasure that was cut short'}"


def _lines(erasure: Erasure, whose: str, todo: list[str]) -> list[str]:
    from art_patch.cli.views.output import ago
    from art_patch.cli.views.safe_text import one_line

    if not erasure.found:
        return [f"nothing is recorded of {whose}"]
    now = time.time()
    verb, will = ("would erase", "would be") if erasure.dry_run else ("erased", "are")
    lines = [f"{verb} {_sentence(erasure, whose)}"]
    if erasure.messages is None and erasure.calls:
        lines.append("messages that other trajectories share stay")
    if erasure.groups:
        dead = f"; {len(erasure.dead_groups)} that waited for training {will} dead" if erasure.dead_groups else ""
        lines.append(f"{_count(len(erasure.groups), 'group', 'groups')} held some of it{dead}")
    if erasure.exports:
        lines.append(f"{_count(len(erasure.exports), 'export holds', 'exports hold')} some of it:")
        for one in erasure.exports:
            path = "stdout" if one.path == "-" else one_line(one.path)
            lines.append(f"  {path} ({one.format}, {ago(now - one.at)} ago, by {one_line(one.who)})")
    if erasure.policies:
        lines.append(f"{_count(len(erasure.policies), 'policy', 'policies')} learned from it:")
        for one in erasure.policies:
            how = "trained on it" if one.how == "trained" else "descends from one that was"
            lines.append(f"  {one.name} ({how}; {'serves now' if one.serves else one.state})")
    return [*lines, *(f"-> {one}" for one in todo)]


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
