"""Which recorded runs a person means, and a page of them: `art-patch trajectories list`, and the page "Runs".

Both read what was asked for here, so that a filter means the same everywhere. Nothing here counts: a caller that can
afford it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from art_patch import store, types
from art_patch._lib.words import MOST_IDS, duration_s, moment, one_line, one_of, the_one
from art_patch.errors import ConfigError

ORIGINS: Mapping[types.Origin, str] = {
    "explicit": "named by the app",
    "otel": "a trace of OpenTelemetry",
    "stitched": "calls whose messages go on from each other",
    "single": "a lone call",
    "imported": "read from a file",
    "shadow": "a copy of a call, answered in the background",
    "resampled": "a turn of another run, answered again",
    "span": "a copy of a part of another run",
    "branch": "another run, from one of its turns on",
}
"""How a run was recognised, in words."""

CATCH_UP_S = 2.0  # for which a search extends the index first


def run_filter(
    given: Mapping[str, Any], *, now: float, shadows: bool = False,
    named: Callable[[str], str] = lambda field: f"--{field.replace('_', '-')}",
) -> store.Filter:  # fmt: skip
    """Return the filter for what a person wrote, by the names of the filter's fields.

    Times and durations (`since`, `until`, `slower_than`) are texts. `now`, seconds since the epoch, is when ages such
    as `7d` count from. `named` says what the person knows a field as.

    Raises:
        ConfigError: if a text cannot be read, or nothing can match.
    """
    chosen = dict(given)
    for name in ("since", "until"):
        if chosen.get(name) is not None:
            chosen[name] = moment(chosen[name], named(name), now)
    if (slow := chosen.pop("slower_than", None)) is not None:
        chosen["slower_than_s"] = duration_s(slow)
        if chosen["slower_than_s"] is None:
            raise ConfigError(f"{named('slower_than')} {slow!r} is no duration such as 2s, 500ms or 1min")
    since, until = chosen.get("since"), chosen.get("until")
    if since is not None and until is not None and since >= until:
        raise ConfigError(f"{named('since')} is not before {named('until')}, so nothing can match")
    for name, known in (("origin", get_args(types.Origin)), ("status", ("ok", "error"))):
        if chosen.get(name) is not None:
            one_of(named(name), chosen[name], known)
    policy = chosen.get("policy")
    if policy not in (None, "upstream") and not re.fullmatch(r".+@\d+", policy):
        raise ConfigError(f"{named('policy')} {policy!r} is neither NAME@STEP nor upstream")
    return store.Filter(shadows=shadows, **chosen)


@dataclass(frozen=True, slots=True)
class RunsWanted:
    """Which page of the chosen runs, in which order, and what they must say."""

    search: tuple[str, ...] = ()  # words of one call, begin*nings or "phrases"; all must be met
    tool: str | None = None  # the model called this tool
    sort: store.Sort = "newest"
    limit: int = 20
    after: str | None = None  # id of the run that the page before ended with
    after_named: str = "--after"

    @property
    def searches(self) -> bool:
        """Whether the search index is needed."""
        return bool(self.search) or self.tool is not None


@dataclass(frozen=True, slots=True)
class RunsPage:
    """The ids of a page, and what the search found if there was one."""

    ids: tuple[str, ...]
    found: store.Found | None = None


def runs_page(
    opened: store.Store, chosen: store.Filter, wanted: RunsWanted, *, catch_up_s: float | None = None
) -> RunsPage:
    """Return a page of the chosen runs.

    A search first extends the index for at most `catch_up_s`, by default two seconds.

    Raises:
        ConfigError: if pages cannot be asked for in this order, or `after` does not match.
        NotFound: if `after` is no run.
    """
    if wanted.after is not None and wanted.sort != "newest":
        raise ConfigError(f"{wanted.after_named} goes on in the order of time, and not in that of the {wanted.sort}")
    browse, start = opened.browse, None if wanted.after is None else the_run(opened, wanted.after)
    if wanted.searches:
        opened.search.extend(seconds=CATCH_UP_S if catch_up_s is None else catch_up_s)
        found = opened.search.find(wanted.search, chosen, tool=wanted.tool)
        if wanted.sort != "newest":
            return RunsPage(tuple(browse.worst(chosen, wanted.sort, among=found.ids, limit=wanted.limit)), found)
        if start is not None and start not in found.ids:
            raise ConfigError(
                f"{wanted.after_named} {one_line(start)}: this trajectory does not match, so no page ends there"
            )
        first = 0 if start is None else found.ids.index(start) + 1
        return RunsPage(found.ids[first : first + wanted.limit], found)
    if wanted.sort != "newest":
        return RunsPage(tuple(browse.worst(chosen, wanted.sort, limit=wanted.limit)))
    cursor = None
    if start is not None:
        (its,) = browse.summaries([start])
        # A page begins after a trajectory and not at a number, so that new ones shift no page.
        cursor = (its.last_call_at, its.id)
    return RunsPage(tuple(key for _, key in browse.ids(chosen, after=cursor, limit=wanted.limit)))


def the_run(opened: store.Store, prefix: str) -> str:
    """Return the id of the run that a person means by its beginning; the whole id is enough.

    Raises:
        NotFound: if no run has an id that begins so.
        ConfigError: if several runs have one that begins so.
    """
    ids = opened.browse.resolve(prefix, limit=MOST_IDS) if prefix else []
    return the_one(prefix, ids, "trajectory", listed_by="art-patch trajectories list")


def policy_is_known(opened: store.Store, name: str) -> bool:
    """Return whether the ledger or a recorded call knows the policy."""
    # Imported runs name policies of another store.
    return bool(opened.ledger.policy(name) or opened.browse.ids(store.Filter(policy=name, shadows=True), limit=1))


def newest_of(
    opened: store.Store, chosen: store.Filter, runs: int, *, before: float | None = None
) -> tuple[store.Filter, float | None]:
    """Return the filter for those among the newest `runs` alone, and since when these are; `None`: it leaves none out.

    Filters that an index cannot answer look at each run, so a page says how far it looked and offers to go on. `before`
    is where that begins, if it is not the filter's `until`.
    """
    at = opened.browse.moment_of(runs, before=chosen.until if before is None else before)
    if at is None or (chosen.since is not None and chosen.since >= at):
        return chosen, None
    return replace(chosen, since=at), at
