"""`art-patch rollback`: who answered before, or whoever is named, answers again."""

from __future__ import annotations

import time
from typing import Annotated, Any

from art_patch import insights, pipeline, types
from art_patch.cli import output
from art_patch.cli.commands.policies import REASON
from art_patch.cli.followers import DryRun, Wait, followed, warn_if_worse
from art_patch.cli.options import ActingProject
from art_patch.cli.typed_options import Option, command


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
        who = project.actor("rollback")
        done = pipeline.roll_back(settings, opened.ledger, to=to, who=who, reason=reason, dry_run=dry.dry_run)
        target, before, ended = done.target, done.before, done.test_ended
        following = followed(opened, settings, wait=wait, dry=dry)
        if not project.as_json:
            is_now, serves = insights.rolled_back_in_words(done)
            told = (is_now, serves, following.words())
            output.say(dry.head + "; ".join(filter(None, told)))
        # Last, because reading the calls of a month takes seconds on a large store.
        rewards = insights.own_rewards(opened, before, target, now=time.time()) if target != before else {}
        facts: dict[str, Any] = {"champion": None if target == types.UPSTREAM_ARM else target}
        facts |= {"test_ended": ended, "rejected": ended if done.state == "rejected" else None}
        facts |= {"was": before, "rewards": rewards} | following.facts()
        if not project.answered(facts):
            warn_if_worse(rewards, before, target)
    following.end()
