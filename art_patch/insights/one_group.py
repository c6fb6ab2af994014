"""What is known of one group: `art-patch groups show`, and the group's page of `art-patch web`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from art_patch import store

WAYS: Mapping[str, str] = {
    "group_key": "art.group(key) was around them",
    "scenario_key": "trajectory(scenario=...) names their task",
    "sibling_spans": "attempts at one task within a run",
    "same_task": "asked in the same words",
    "near_duplicate": "asked in nearly the same words",
    "resampled": "a turn of a lone run, answered again",
    "branched": "a lone run, run again from one of its turns",
    "single": "one run, for the gate",
}
"""The ways in which siblings are found, the most certain first, with their description."""

STATES: Mapping[str, str] = {
    "formed": "the judge has not scored its siblings, as those of each held-out group",
    "scored": "an update may learn from it",
    "trained": "an update has learned from it",
    "dead": "it teaches nothing, so no update learns from it",
    "stale": "its answers are too old or too far for an update",
    "quarantined": "its scores are not believed, so no update learns from it",
    "spent": "it is used up and is not learned from",
}
"""State of a group -> what it means."""

_COPIED = "its run has copies that are siblings in other groups"


def state_in_words(state: str) -> str:
    """Return what a group's state means."""
    return STATES.get(state, _COPIED)


def way_in_words(how: str) -> str:
    """Return how a group's siblings were found."""
    return WAYS.get(how, "not known to this release")


def group_facts(
    opened: store.Store, one: store.GroupFacts, *, openings: bool = True, most: int | None = None
) -> dict[str, Any]:
    """Return a group with its siblings, their scores and the judgements.

    The scores are those that were given in this group, or by users and code, oldest first. `openings` adds the first
    words of the user, which is slow; at most `most` siblings are read.
    """
    runs = one.runs[:most]
    summaries = opened.browse.summaries(runs, openings=openings)
    scores = opened.groups.scores(runs)
    siblings: list[dict[str, Any]] = [
        {
            **asdict(each),
            "status": each.status,
            "scores": [asdict(score) for score in scores.get(each.id, ()) if score.group_id in (None, one.id)],
        }
        for each in summaries
    ]
    return asdict(one) | {"siblings": siblings}


def best_first(siblings: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the siblings of a group by their rewards, those without one first."""
    return sorted(map(dict, siblings), key=lambda run: (-2.0 if run["reward"] is None else -run["reward"], run["id"]))
