"""Erases a person's data from the store, and says what a person still has to do: `art-patch erase`, and the web page.

The store cannot undo copies outside it, and weights. So each erasure comes with the exports that hold the data, the
policies that learned from it, and sentences with the exact commands.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from art_patch import pipeline, store
from art_patch._lib.words import ago, counted, listed, one_line
from art_patch.settings import Settings
from art_patch.types import CHALLENGERS, JSON, Policy

_HOW = {
    "trained": "trained on it",
    "descends": "descends from one that was",
    "copy": "an imported copy of one that was",
}


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What was erased, or would be in a dry run; copies of policies that left the project; what is left to do."""

    erasure: store.Erasure
    what: str  # `user`, `session` or `trajectory`
    value: str
    copies: tuple[JSON, ...]
    todo: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return what it is about, and how many rows of which kind."""
        its = self.erasure
        # The number of messages is unknown while other trajectories may share them with these.
        parts = ("calls", "messages", "scores", "spans", "corrections", "gate_answers", "judgements")
        numbers = {part.replace("_", " "): getattr(its, part) for part in parts}
        found = [counted(count, name.removesuffix("s"), name) for name, count in numbers.items() if count]
        if its.trajectories:
            found.insert(0, counted(its.trajectories, "trajectory", "trajectories"))
        nothing = "nothing left but the end of an erasure that was cut short"
        return f"{self.what} {self.value}: {listed(found, nothing)}"

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON."""
        about = {"subject": {self.what: self.value}, "policy_copies": list(self.copies), "todo": list(self.todo)}
        return asdict(self.erasure) | {"found": self.erasure.found} | about

    def lines(self, *, now: float) -> list[str]:
        """Return everything in words, a line each."""
        its = self.erasure
        if not its.found:
            late = "" if its.dry_run else "; what apps recorded of it and have not written yet is dropped"
            return [f"nothing is recorded of {self.what} {self.value}{late}"]
        verb, will = ("would erase", "would be") if its.dry_run else ("erased", "are")
        lines = [f"{verb} {self.sentence}"]
        if its.messages is None and its.calls:
            lines.append("messages that other trajectories share stay")
        if its.groups:
            dead = f"; {len(its.dead_groups)} that waited for training {will} dead" if its.dead_groups else ""
            lines.append(f"{counted(len(its.groups), 'group', 'groups')} held some of it{dead}")
        if its.exports:
            lines.append(f"{counted(len(its.exports), 'export holds', 'exports hold')} some of it:")
            for one in its.exports:
                path = "stdout" if one.path == "-" else one_line(one.path)
                lines.append(f"  {path} ({one.format}, {ago(now - one.at)} ago, by {one_line(one.who)})")
        if its.policies:
            lines.append(f"{counted(len(its.policies), 'policy', 'policies')} learned from it:")
            for one in its.policies:
                lines.append(f"  {one.name} ({_HOW[one.how]}; {'serves now' if one.serves else one.state})")
        if self.copies:
            lines.append(f"{counted(len(self.copies), 'copy', 'copies')} of these policies left the project:")
            for each in self.copies:
                by = f"{ago(now - each['at'])} ago, by {one_line(each['who'])}"
                lines.append(f"  {each['policy']} to {one_line(each['to'])} ({by})")
        return [*lines, *(f"-> {one}" for one in self.todo)]


def erase(
    settings: Settings, opened: store.Store, *, user: str | None = None, session: str | None = None,
    trajectory: str | None = None, who: str = "art_patch", dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ErasureReport:  # fmt: skip
    """Erase the data of a user, a session or a trajectory, as `Rights.erase` does, with its errors."""
    subject = {"user": user, "session": session, "trajectory": trajectory}
    run = partial(opened.rights.erase, **subject)
    erasure = run(dry_run=True) if dry_run else run(who=who, progress=progress)
    policies = opened.ledger.policies()
    ((what, value),) = [(key, one) for key, one in subject.items() if one is not None]
    # What the store cannot undo by itself: copies outside it, and weights.
    copies = tuple(opened.transfers.copies_of([one.name for one in erasure.policies]))
    todo = _advice(erasure, policies, settings.project, champions=opened.ledger.champions(), copied=bool(copies))
    names = [one.name for one in policies]
    if erasure.found and not dry_run and not pipeline.forget_unfinished(settings.directory, names):
        todo.append(
            "A cycle is at work, or `reproduce`; if it trains, its copy of the data is deleted when it has ended."
        )
    return ErasureReport(erasure, what, value, copies, tuple(todo))


def _advice(
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
