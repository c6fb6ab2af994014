"""The page "Runs": the recorded runs that a person looks for, and how many came since a page was shown.

What a filter means, and what a search finds, is decided where `art-patch trajectories list` does it
(`insights.run_list`). Filters that no index answers look at the newest `LOOKED_AT` runs; the page says so, and goes on
from there.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any, Literal

from pydantic import Field, model_validator

from art_patch import insights, store
from art_patch.errors import ConfigError
from art_patch.types import JSON
from art_patch.web.projects import Asked, Query

PAGE = 50
LOOKED_AT = 5_000
COUNTED = 1_000  # of more runs that match, a page says that there are more
CATCH_UP_S = 0.2  # for which a search extends the index first
_MOST_NEW = 100

# Fields of the form that are no conditions on a run.
_NOT_FILTERS = ("search", "tool", "sort", "after", "than", "trainable")
_INDEXED = ("user", "session", "group")


class RunsQuery(Query):
    """The fields of the form; a field that is left empty is no condition."""

    search: str | None = Field(None, description='Words that a call of the run says, begin* or a "phrase".')
    name: str | None = Field(None, description="The run's name, such as that of the agent.")
    user: str | None = Field(None, description="Id of the user.")
    session: str | None = Field(None, description="Id of the session.")
    scenario: str | None = Field(None, description="Key of the scenario.")
    group: str | None = Field(None, description="Id or key of the group.")
    policy: str | None = Field(None, description="NAME@STEP of a policy that answered, or upstream.")
    model: str | None = Field(None, description="Model that a call asked for, or that answered it.")
    tool: str | None = Field(None, description="Tool that the model called.")
    tag: str | None = Field(None, description="Tag of the run.")
    min_reward: float | None = Field(None, allow_inf_nan=False, description="Least reward.")
    max_reward: float | None = Field(None, allow_inf_nan=False, description="Largest reward.")
    status: Literal["ok", "error"] | None = Field(None, description="`error`: the run or one of its calls failed.")
    error: str | None = Field(None, description="Text in the error of the run or of a call.")
    slower_than: str | None = Field(None, description="A call took at least as long: 2s, 500ms.")
    trainable: Literal["yes", "no"] | None = Field(None, description="Whether a call can be trained on.")
    untrainable: str | None = Field(None, description="Text in the reason why a call cannot be trained on.")
    origin: str | None = Field(None, description="How the run was identified, such as explicit or imported.")
    since: str | None = Field(None, description="The last call ended then or later: 2026-11-21T14:00, or an age: 7d.")
    until: str | None = Field(None, description="The last call ended earlier.")
    sort: Literal["newest", "reward", "latency"] = Field("newest", description="Which runs come first.")
    after: str | None = Field(None, description="Id of the run that the page before ended with.")

    @model_validator(mode="before")
    @classmethod
    def _without_blanks(cls, given: Any) -> Any:
        """A form sends all of its fields, with the spaces that people type. Databases refuse NUL."""

        def plain(name: str, value: Any) -> Any:
            if not isinstance(value, str):
                return value
            text = value.replace("\0", "")
            return text if name == "after" else text.strip()

        texts = {name: plain(name, value) for name, value in given.items()}
        return {name: value for name, value in texts.items() if value != ""}

    def chosen(self, now: float) -> store.Filter:
        """Return the filter; `ConfigError` names the field that is wrong."""
        given = {name: value for name, value in self if name not in _NOT_FILTERS}
        given["trainable"] = None if self.trainable is None else self.trainable == "yes"
        return insights.run_filter(given, now=now, named=lambda field: field.replace("_", " "))

    def asked(self) -> dict[str, Any]:
        """Return the fields that are set, as the address of the first page has them."""
        return self.model_dump(exclude={"after", "than"}, exclude_defaults=True)


class NewRunsQuery(RunsQuery):
    """The same fields, and the moment of the newest run that a page shows."""

    than: float = Field(0.0, allow_inf_nan=False, description="Seconds since the epoch.")


def facts(asked: Asked) -> JSON:
    """Return the page's facts."""
    query: RunsQuery = asked.query
    found: dict[str, Any] = {
        "asked": query.asked(), "wrong": None, "runs": [], "after": query.after, "next": None,
        "total": None, "looked_since": None, "older": None, "search": None, "newest_at": None,
    }  # fmt: skip
    try:
        found |= _page(asked, query)
    except ConfigError as error:
        found["wrong"] = str(error)
    return found | {
        "policies": ["upstream", *(each.name for each in reversed(asked.store.ledger.policies()))][:200],
        "origins": dict(insights.ORIGINS),
        "is_empty": not (found["runs"] or asked.store.browse.ids(store.Filter(shadows=True), limit=1)),
    }


def _page(asked: Asked, query: RunsQuery) -> dict[str, Any]:
    opened = asked.store
    chosen = query.chosen(asked.now)
    said = (query.search,) if query.search else ()
    limit = PAGE if query.after else COUNTED + 1  # the first page counts all that match
    wanted = insights.RunsWanted(said, query.tool, query.sort, limit, query.after, "after")
    if wanted.searches and asked.settings.search == "off":
        raise ConfigError("the search is off; set ART_PATCH_SEARCH=on for this command, for serve and for retrain")
    since = None
    if not wanted.searches and _looks_at_each(query, chosen):
        chosen, since = _bounded(opened, chosen, query.after)
    page = insights.runs_page(opened, chosen, wanted, catch_up_s=CATCH_UP_S)
    shown = page.ids[:PAGE]
    runs = [
        asdict(one) | {"status": one.status, "duration_s": one.duration_s}
        for one in opened.browse.summaries(shown, openings=True)
    ]
    is_full = len(shown) == PAGE and query.sort == "newest"
    if page.found is not None:
        is_full = is_full and shown[-1] != page.found.ids[-1]
    followed = query.sort == "newest" and not (wanted.searches or query.after or query.until)
    return {
        "runs": runs,
        "next": shown[-1] if is_full else None,
        "total": None if query.after else _total(page),
        "looked_since": since,
        "older": None if since is None or is_full else _until(since),
        "search": page.found and {"lag": page.found.lag, "more": page.found.more, "matching": len(page.found.ids)},
        "newest_at": (runs[0]["last_call_at"] if runs else asked.now) if followed else None,
    }


def _total(page: insights.RunsPage) -> JSON:
    """Return how many runs match, counted up to a limit; `more` if there are more than that."""
    more = len(page.ids) > COUNTED or (page.found is not None and page.found.more)
    return {"runs": min(len(page.ids), COUNTED), "more": more}


def _looks_at_each(query: RunsQuery, chosen: store.Filter) -> bool:
    """Whether the database reads runs that do not match, one after the other."""
    if any(getattr(query, name) is not None for name in _INDEXED):
        return False
    plain = store.Filter(since=chosen.since, until=chosen.until)
    return query.sort != "newest" or chosen != plain


def _bounded(opened: store.Store, chosen: store.Filter, after: str | None) -> tuple[store.Filter, float | None]:
    ended = [one.last_call_at for one in opened.browse.summaries([after])] if after else []
    before = min((at for at in (*ended, chosen.until) if at is not None), default=None)
    return insights.newest_of(opened, chosen, LOOKED_AT, before=before)


def _until(at: float) -> str:
    """Return the moment as the field `until` takes it, never before `at`."""
    return datetime.fromtimestamp(math.ceil(at * 1e6) / 1e6).astimezone().isoformat(timespec="microseconds")


def new_runs(asked: Asked) -> JSON:
    """Return how many runs of these filters are newer than the newest one that a page shows."""
    query: NewRunsQuery = asked.query
    newer = math.nextafter(query.than, math.inf)
    chosen = query.chosen(asked.now)
    chosen = replace(chosen, since=newer if chosen.since is None else max(newer, chosen.since))
    chosen, _ = insights.newest_of(asked.store, chosen, LOOKED_AT)
    number = len(asked.store.browse.ids(chosen, limit=_MOST_NEW + 1))
    return {"asked": query.asked(), "than": query.than, "new": min(number, _MOST_NEW), "more": number > _MOST_NEW}
