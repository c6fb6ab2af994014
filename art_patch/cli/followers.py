"""Tells what a change of the route brings: how many app processes follow, and whether users liked the policy less."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from art_patch import insights, store, types
from art_patch._lib.option import Option
from art_patch.cli import output
from art_patch.settings import Settings

# A process reports at least once a minute; one that is silent for longer has ended, or cannot reach the store.
SEEN_S = 90.0
WAIT_S = 30.0
_LOOK_EVERY_S = 0.25
# By how much the clock of an app's machine may be slow. While one waits, a report that is older than `SEEN_S` and
# changes is of a process that lives.
_SLOW_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Wait:
    """The option of commands that change what running apps do."""

    wait: Annotated[
        bool, Option("Wait until every app process has reported that it follows, for half a minute at most.")
    ] = False


@dataclass(frozen=True, slots=True)
class DryRun:
    """The option of the same commands that changes nothing."""

    dry_run: Annotated[bool, Option("Only say what would change, or why it is refused.")] = False

    @property
    def head(self) -> str:
        """How the command's answer begins."""
        return "dry run, nothing is changed: " if self.dry_run else ""


@dataclass(frozen=True, slots=True)
class Followers:
    """App processes that have reported within the last minute and a half, by whether they follow the present route."""

    follow: tuple[str, ...]
    others: tuple[str, ...]
    poll_s: float  # apps read the route so often
    waited: bool
    dry_run: bool  # nothing was changed

    def words(self) -> str:
        """Say how many there are."""
        count = len(self.follow) + len(self.others)
        named = output.counted(count, "app process", "app processes")
        if not count:
            return "no app process runs at present"
        if self.dry_run:
            return f"{named} would follow"
        verb = "follows" if count == 1 else "follow"
        if not self.waited:
            return f"{named} {verb} within {self.poll_s:g} s"
        missing = f"; not yet, or gone: {', '.join(self.others)}" if self.others else ""
        return f"{len(self.follow)} of {named} {verb}{missing}"

    def facts(self) -> dict[str, Any]:
        """Return the fields of the command's answer as JSON."""
        waited = {"followed": list(self.follow), "not_followed": list(self.others)} if self.waited else {}
        return {"apps": len(self.follow) + len(self.others), "dry_run": self.dry_run} | waited

    def end(self) -> None:
        """End the command with exit code 1 if it waited for apps in vain."""
        if self.waited and self.others:
            raise typer.Exit(1)


def followed(opened: store.Store, settings: Settings, *, wait: Wait, dry: DryRun) -> Followers:
    """Look which app processes follow the present route; `wait` for all of them, for `WAIT_S` at most.

    Reports carry the time of the app's machine. One of a machine whose clock is slow counts once it changes.
    """
    waits = wait.wait and not dry.dry_run
    until = time.monotonic() + WAIT_S
    # An app reports at its next look at the route that it follows.
    until_heard = time.monotonic() + min(WAIT_S, 2 * settings.poll_interval_s + 1.0)
    since = time.time() - SEEN_S
    before = {app.id: app.at for app in opened.read.apps(since=since - _SLOW_S)}
    while True:
        route, follow, others = opened.ledger.route(), list[str](), list[str]()
        # As apps see it: without a champion, the learner gets copies of their calls.
        challenger = route.challenger or (None if route.champion else route.learner)
        wanted: types.JSON = {"champion": route.champion, "challenger": challenger}
        shares: types.JSON = {
            "challenger_percent": route.challenger_percent or 0.0,
            "control_percent": route.control_percent,
        }
        shares |= {"challenger_state": route.challenger_state} if route.challenger else {}
        # Without one in the store, each app goes by its own.
        wanted |= {} if route.mode is None else {"mode": route.mode}
        shares |= {} if route.canary_percent is None else {"canary_percent": route.canary_percent}
        silent = False
        for app in opened.read.apps(since=since - _SLOW_S):
            if app.at < since and before.get(app.id) == app.at:
                silent = True  # it has ended, or its clock is slow
                continue
            does = all(app.facts.get(name) == value for name, value in wanted.items())
            # An app of an older release does not tell its shares.
            does = does and all(app.facts.get(name, value) == value for name, value in shares.items())
            (follow if does else others).append(app.id)
        now = time.monotonic()
        if not waits or now > until or not (others or (silent and now < until_heard)):
            return Followers(tuple(follow), tuple(others), settings.poll_interval_s, waits, dry.dry_run)
        time.sleep(_LOOK_EVERY_S)


def warn_if_worse(rewards: dict[str, dict[str, float]], before: str, target: str) -> None:
    """Say so if users and the app gave the runs of `target` lower rewards than those of `before`."""
    if (words := insights.worse_in_words(rewards, before, target)) is not None:
        output.stderr().print(f"careful: {words}", soft_wrap=True)


def warn_if_rejected_there(policy: types.Policy) -> None:
    """Say so if an imported policy was rejected in the project that it comes from."""
    if (by := insights.rejected_there(policy)) is not None:
        said = f"[red]careful[/]: {policy.name} was [b]rejected[/] where it comes from, {output.escape(by)}"
        output.stderr().print(said, soft_wrap=True)
