"""Tells how many app processes follow a change of the route, and waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from art_patch import store
from art_patch._lib.option import Option
from art_patch.cli import output
from art_patch.settings import Settings

# A process reports at least once a minute; one that is silent for longer has ended, or cannot reach the store.
SEEN_S = 90.0
WAIT_S = 30.0
_LOOK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Wait:
    """The option of commands that change what running apps do."""

    wait: Annotated[
        bool, Option("Wait until every app process has reported that it follows, for half a minute at most.")
    ] = False


@dataclass(frozen=True, slots=True)
class Followers:
    """App processes that have reported within the last minute and a half, by whether they follow the present route."""

    follow: tuple[str, ...]
    others: tuple[str, ...]
    poll_s: float  # apps read the route so often
    waited: bool

    def words(self, *, would: bool = False) -> str:
        """Say how many there are; `would`: nothing was changed."""
        count = len(self.follow) + len(self.others)
        named = output.counted(count, "app process", "app processes")
        if not count:
            return "no app process runs at present"
        if would:
            return f"{named} would follow"
        verb = "follows" if count == 1 else "follow"
        if not self.waited:
            return f"{named} {verb} within {self.poll_s:g} s"
        missing = f"; not yet, or gone: {', '.join(self.others)}" if self.others else ""
        return f"{len(self.follow)} of {named} {verb}{missing}"

    def facts(self) -> dict[str, Any]:
        """Return the fields of the command's answer as JSON."""
        waited = {"followed": list(self.follow), "not_followed": list(self.others)} if self.waited else {}
        return {"apps": len(self.follow) + len(self.others)} | waited

    def end(self) -> None:
        """End the command with exit code 1 if it waited for apps in vain."""
        if self.waited and self.others:
            raise typer.Exit(1)


def followed(opened: store.Store, settings: Settings, *, wait: bool) -> Followers:
    """Look which app processes follow the present route; `wait` for all of them, for `WAIT_S` at most."""
    until = time.monotonic() + WAIT_S
    since = time.time() - SEEN_S
    while True:
        route, follow, others = opened.ledger.route(), list[str](), list[str]()
        # As apps see it: without a champion, the learner gets copies of their calls.
        challenger = route.challenger or (None if route.champion else route.learner)
        wanted = {"champion": route.champion, "challenger": challenger} | ({"mode": route.mode} if route.mode else {})
        for app in opened.read.apps(since=since):
            does = all(app.facts.get(name) == value for name, value in wanted.items())
            (follow if does else others).append(app.id)
        if not (wait and others) or time.monotonic() > until:
            return Followers(tuple(follow), tuple(others), settings.poll_interval_s, wait)
        time.sleep(_LOOK_EVERY_S)
