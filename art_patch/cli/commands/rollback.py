"""`art-patch rollback`: who answered before, or whoever is named, answers again."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from art_patch import promotion, store, types
from art_patch.cli import output
from art_patch.cli.commands.policies import REASON, find_engine, unload
from art_patch.cli.followers import DryRun, Wait, followed, own_rewards, warn_if_worse
from art_patch.cli.options import ActingProject
from art_patch.cli.typed_options import Option, command
from art_patch.errors import ArtPatchError, TransitionError
from art_patch.settings import Settings


@command
def rollback(
    project: ActingProject,
    wait: Wait,
    dry: DryRun,
    to: Annotated[
        str | None,
        Option(
            "Who answers then: an earlier champion, or `upstream`; a test that is running ends as well. Default: end "
            "the test if there is one, else the champion before.",
            metavar="NAME@STEP|upstream",
        ),
    ] = None,
    reason: Annotated[str, REASON] = "rolled back by hand",
) -> None:
    """Reject the policy that is being tested. If none is being tested, make the previous champion serve again.

    Beside upstream, a policy that is tested is not rejected but learns on. One that was retired before its test is
    retired again. If the champion has taken upstream's place,
    upstream answers again, and the policy learns on.

    It also works while the engine is down. If upstream answers already, or whoever is named, there is nothing to do;
    one goes from upstream to an earlier champion by its name.

    Exit codes: 0 they answer, or answered already; 19 there is no such policy, or no champion before this one; 14 that
    policy never served, or was rejected.
    """
    with project.opened() as (settings, opened):
        ledger, who = opened.ledger, project.actor("rollback")
        before, tested = _answering(ledger), ledger.challenger()
        # From upstream nobody goes back to a policy unasked: a second rollback would undo the first.
        stays = to == before or (to is None and (tested is not None or before == types.UPSTREAM_ARM))
        # First of all: what cannot be gone back to is refused before anything is changed.
        target = before if stays else promotion.rollback_target(ledger, to)
        if dry.dry_run:
            ended = tested.name if tested else None
        else:
            ended = _go_back(settings, ledger, target, who=who, reason=reason)
        state = _after_test(ledger, ended, dry)
        following = followed(opened, settings, wait=wait, dry=dry)
        if not project.as_json:
            serves = f"[b]{target}[/] {'answers every session' if target == before else 'serves again'}"
            if stays and tested is None:
                serves = f"nothing to do: [b]{target}[/] answers already"
            is_now = f"{ended} {'is trained on' if state == 'learner' else f'is {state}'}" if ended else ""
            told = (is_now, serves, following.words())
            output.stdout().print(dry.head + "; ".join(filter(None, told)), soft_wrap=True)
        # Last, because reading the calls of a month takes seconds on a large store.
        rewards = own_rewards(opened, before, target) if target != before else {}
        facts: dict[str, Any] = {"champion": None if target == types.UPSTREAM_ARM else target}
        facts |= {"test_ended": ended, "rejected": ended if state == "rejected" else None}
        facts |= {"was": before, "rewards": rewards} | following.facts()
        if not project.answered(facts):
            warn_if_worse(rewards, before, target)
    following.end()


def _answering(ledger: store.Ledger) -> str:
    champion = ledger.champion()
    return champion.name if champion is not None else types.UPSTREAM_ARM


def _go_back(settings: Settings, ledger: store.Ledger, to: str, *, who: str, reason: str) -> str | None:
    """End the test, if there is one, and let `to` answer; return the name of the policy whose test has ended."""
    # The ledger comes first: an engine that hangs must not delay what takes a bad policy off the traffic.
    ended = None
    with suppress(TransitionError):  # somebody else has just ended it, or promoted the policy
        ended = promotion.give_up(ledger, None, who=who, reason=reason)
    # So also if a server has promoted the tested policy in this moment.
    if _answering(ledger) != to:
        try:
            # A rollback is urgent: an engine that takes longer than a second is not waited for.
            promotion.rollback(ledger, find_engine(settings, ledger, within_s=1.0), to=to, who=who, reason=reason)
        except ArtPatchError as error:
            if ended is not None:
                error.args = (f"the test of {ended} has ended, but {to} does not answer yet: {error}",)
            raise
    if ended is not None and ended not in promotion.wanted(ledger):
        unload(settings, ledger, ended)
    return ended


def _after_test(ledger: store.Ledger, ended: str | None, dry: DryRun) -> types.PolicyState | None:
    """Return the state of the policy whose test has ended, or would end; `None` without one."""
    policy = ledger.policy(ended) if ended else None
    if policy is None:
        return None
    return ledger.after_test(policy.name) if dry.dry_run else policy.state
