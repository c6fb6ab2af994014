"""The pages on groups: the list by state, and one group with two of its siblings side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import Field, field_validator

from art_patch import insights, rewards, store
from art_patch.errors import NotFound
from art_patch.trajectories import transcript
from art_patch.types import JSON
from art_patch.web.projects import Asked, Query
from art_patch.web.templates import key_of_field
from art_patch.web.word_diff import compared

_FRESH_S = 5.0
_PAGE = 50
_MOST_SIBLINGS = 64


class GroupsQuery(Query):
    """Which groups are listed."""

    state: str | None = Field(None, description="State, such as scored, trained, dead or quarantined.")
    scenario: str | None = Field(None, description="Key of the scenario.")
    policy: str | None = Field(None, description="A policy that was trained on the group.")
    held_out: Literal["yes", "no"] | None = Field(None, description="Whether the group is kept for the gate.")
    before: str | None = Field(None, description="Id of the last group of the page before.")

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return value or None  # a form sends its empty fields, too


class GroupQuery(Query):
    """Which two siblings are compared."""

    left: str | None = Field(None, description="Id of the sibling on the left. Default: the one with the best reward.")
    right: str | None = Field(None, description="Id of the sibling on the right. Default: the one with the worst.")


def facts(asked: Asked) -> JSON:
    """Return the facts of the list."""
    query: GroupsQuery = asked.query
    held_out = None if query.held_out is None else query.held_out == "yes"
    wanted = store.GroupFilter(query.state, query.scenario, held_out, query.policy)
    lines = asked.store.groups.page(wanted, before=query.before, limit=_PAGE + 1)
    shown = lines[:_PAGE]
    states = asked.project.kept("groups by state", _FRESH_S, asked.store.groups.states)
    return {
        "states": [
            {"state": state, "groups": count, "means": insights.state_in_words(state)}
            for state, count in states.items()
        ],
        "groups": [asdict(line) for line in shown],
        "before": shown[-1].id if len(lines) > _PAGE else None,  # of the next page
    }


def one(asked: Asked) -> JSON:
    """Return the facts of one group."""
    opened, key = asked.store, asked.ids["id"]
    found = [each for each in opened.browse.groups_like(key, limit=1) if each.id == key] if key else []
    if not found:
        raise NotFound(f"there is no group {key!r}; the list of groups has their ids")
    (group,) = found
    its = insights.group_facts(opened, group, openings=False, most=_MOST_SIBLINGS)
    siblings = insights.best_first(its["siblings"])
    lessons = opened.groups.taught(group.id, group.runs[:_MOST_SIBLINGS])
    taught: defaultdict[str, list[JSON]] = defaultdict(list)
    for each in lessons:
        taught[each.trajectory_id].append(asdict(each))
    seconds = [each["facts"] for each in group.judgements if each["purpose"] == "second pass" and each["state"] == "ok"]
    ways = rewards.both_ways(seconds[-1], group.id, group.runs) if seconds else {}
    for sibling in siblings:
        sibling["taught"] = taught[sibling["id"]]
        sibling["both_ways"] = _ranked(ways, sibling["id"])
    return its | {
        "siblings": siblings,
        "means": insights.state_in_words(group.state),
        "way": insights.way_in_words(group.how),
        "updates": [_update(opened, name, lessons) for name in group.trained],
        "why_not": None if group.trained else _why_not(group),
        "siblings_cut": max(0, len(group.runs) - _MOST_SIBLINGS),
        "judged_twice": bool(seconds),
        "noise": seconds[-1].get("noise") if seconds else None,
        "compared": _compared(opened, siblings, asked.query),
    }


def _update(opened: store.Store, name: str, lessons: Sequence[store.Taught]) -> JSON:
    """Return what an update learned from a group; no advantages if the store has no row of them any more."""
    policy, its = opened.ledger.policy(name), [each for each in lessons if each.policy == name]
    return {
        "policy": name,
        "state": policy.state if policy is not None else None,
        "at": policy.created_at if policy is not None else None,
        "siblings": len(its),
        "advantages": sorted(advantage for each in its for advantage in each.advantages),
    }


def _why_not(group: store.GroupFacts) -> str:
    """Return why no update has learned from a group."""
    if group.held_out:
        return "it is held out: the gate compares policies on it, so no update may learn from it"
    if group.state == "scored":
        return "no update has come to it yet: the next cycle may learn from it"
    return group.reason or insights.state_in_words(group.state)


def _ranked(ways: dict[str, tuple[float, float]], run: str) -> JSON | None:
    """Return the scores that a run got in both orders, and its rank among its siblings in each: 1 is the best."""
    if run not in ways:
        return None
    scores = ways[run]
    ranks = [1 + sum(others[way] > scores[way] for others in ways.values()) for way in (0, 1)]
    return {"scores": list(scores), "ranks": ranks}


def _compared(opened: store.Store, siblings: list[dict[str, Any]], query: GroupQuery) -> JSON | None:
    ids = [each["id"] for each in siblings]
    if len(ids) < 2:
        return None
    # Those without a reward come first in the list.
    rewarded = [each["id"] for each in siblings if each["reward"] is not None] or ids
    # A form has them as `segment` writes them.
    left, right = (key if key is None or key in ids else key_of_field(key) for key in (query.left, query.right))
    left = rewarded[0] if left is None else left
    if right is None:
        right = next((key for key in reversed(rewarded) if key != left), next(key for key in ids if key != left))
    if wrong := [key for key in (left, right) if key not in ids]:
        raise NotFound(f"{wrong[0]!r} is no sibling of this group")
    whole = {each.id: transcript(each) for each in opened.read.trajectories([left, right])}
    return {"left": left, "right": right, **compared(whole.get(left, ()), whole.get(right, ()))}
