"""`art-patch rollback`: who answered before, or whoever is named, answers again."""

from __future__ import annotations

import time
from typing import Annotated

from art_patch import promotion, store, types
from art_patch.cli import output
from art_patch.cli.commands.policies import REASON, find_engine, unload
from art_patch.cli.followers import Wait, followed
from art_patch.cli.options import ActingProject
from art_patch.cli.typed_options import Option, command
from art_patch.settings import Settings


@command
def rollback(
    project: ActingProject,
    wait: Wait,
    to: Annotated[
        str | None,
        Option(
            "Who answers then: an earlier champion, or `upstream`; a test that is running ends as well. Default: end "
            "the test if there is one, else the champion before.",
            metavar="NAME@STEP|upstream",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("Only show what would change, and the rewards of both.")] = False,
    reason: Annotated[str, REASON] = "rolled back by hand",
) -> None:
    """Reject the policy that is being tested. If none is being tested, make the previous champion serve again.

    Beside upstream, a policy that is tested is not rejected but learns on. If the champion has taken upstream's place,
    upstream answers again, and the policy learns on.

    It also works while the engine is down.
    """
    with project.opened() as (settings, opened):
        ledger, who = opened.ledger, project.actor("rollback")
        before, tested = _answering(ledger), ledger.challenger()
        # First of all: what cannot be gone back to is refused before anything is changed.
        target = before if tested and to in (None, before) else promotion.rollback_target(ledger, to)
        if dry_run:
            ended = tested.name if tested else None
        else:
            ended = _go_back(settings, ledger, target, who=who, reason=reason)
        following = followed(opened, settings, wait=wait.wait and not dry_run)
        if not project.as_json:
            serves = f"[b]{target}[/] {'answers every session' if target == before else 'serves again'}"
            told = (_end_of_test(ledger, ended, before, dry_run=dry_run), serves, following.words(would=dry_run))
            head = "dry run, nothing is changed: " if dry_run else ""
            output.stdout().print(head + "; ".join(filter(None, told)), soft_wrap=True)
        # Last, because reading the calls of a month takes seconds on a large store.
        rewards = _rewards(opened, before, target) if target != before else {}
        facts = {"champion": None if target == types.UPSTREAM_ARM else target, "rejected": ended}
        facts |= {"was": before, "dry_run": dry_run, "rewards": rewards} | following.facts()
        if not project.answered(facts):
            _warn_if_worse(rewards, before, target)
    following.end()


def _answering(ledger: store.Ledger) -> str:
    champion = ledger.champion()
    return champion.name if champion is not None else types.UPSTREAM_ARM


def _go_back(settings: Settings, ledger: store.Ledger, to: str, *, who: str, reason: str) -> str | None:
    """End the test, if there is one, and let `to` answer; return the name of the policy whose test has ended."""
    # The ledger comes first: an engine that hangs must not delay what takes a bad policy off the traffic.
    ended = promotion.give_up(ledger, None, who=who, reason=reason)
    # So also if a server has promoted the tested policy in this moment.
    if _answering(ledger) != to:
        # A rollback is urgent: an engine that takes longer than a second is not waited for.
        promotion.rollback(ledger, find_engine(settings, ledger, within_s=1.0), to=to, who=who, reason=reason)
    if ended is not None and ended not in promotion.wanted(ledger):
        unload(settings, ledger, ended)
    return ended


def _end_of_test(ledger: store.Ledger, ended: str | None, before: str, *, dry_run: bool) -> str:
    """Return in words what has become of the policy under test, or would become of it; empty without one."""
    policy = ledger.policy(ended) if ended else None
    if policy is None:
        return ""
    learns_on = policy.state == "canary" and before == types.UPSTREAM_ARM
    state = ("learner" if learns_on else "rejected") if dry_run else policy.state
    return f"{policy.name} {'is trained on' if state == 'learner' else f'is {state}'}"


def _rewards(opened: store.Store, *names: str) -> dict[str, dict[str, float]]:
    """Return the mean reward that users and the app gave these policies' runs of the last 28 days, and their number."""
    now = time.time()
    runs = opened.reports.usage(since=now - store.CONTROL_S, until=now).runs
    found = dict[str, dict[str, float]]()
    for name in names:
        own = [run for run in runs if (run.policy or types.UPSTREAM_ARM) == name and not run.copy]
        its = [run.reward for run in own if run.reward is not None]
        if its:
            found[name] = {"reward": sum(its) / len(its), "runs": len(its)}
    return found


def _warn_if_worse(rewards: dict[str, dict[str, float]], before: str, target: str) -> None:
    if before in rewards and target in rewards and rewards[target]["reward"] < rewards[before]["reward"]:
        counts = {name: output.counted(int(rewards[name]["runs"]), "run", "runs") for name in (target, before)}
        each = [f"{name} {rewards[name]['reward']:.3f} in {count}" for name, count in counts.items()]
        careful = f"careful: by the app's own rewards that is worse: {' against '.join(each)}"
        output.stderr().print(careful, soft_wrap=True)
