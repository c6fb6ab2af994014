"""The page on which people compare two siblings of a group, without who answered and what the judge said."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from pydantic import Field, field_validator

from art_patch import rewards, store
from art_patch._lib.ids import derived_id
from art_patch._lib.loose_json import shallow
from art_patch.errors import NotFound
from art_patch.trajectories import transcript
from art_patch.types import JSON
from art_patch.web.projects import Asked, Query
from art_patch.web.review_queue import Kind, Pair, key_of, next_pair, pair_of, score_id
from art_patch.web.word_diff import compared

_FRESH_S = 30.0


class ReviewQuery(Query):
    """Which pair is shown."""

    kind: Kind = Field("pairs", description="pairs: any group. unsure: where the judge disagrees with itself.")
    after: str | None = Field(None, description="Key of the pair that is skipped, as `item.key` has it.")
    group: str | None = Field(None, description="Id of the group whose pair is shown, answered or not.")
    answered: str | None = Field(None, description="Id of a group whose pair was answered: it is shown with all facts.")

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any, info: Any) -> Any:
        return value or ("pairs" if info.field_name == "kind" else None)


def thumbs_id(run: str) -> str:
    """Return the id of the score that a thumb on the page gives this run."""
    return derived_id("review", run, "thumbs")


def correction_id(run: str) -> str:
    """Return the id of the correction that a person makes of this run on the page."""
    return derived_id("review", run, "correction")


def facts(asked: Asked) -> JSON:
    """Return the facts of the page. A pair has neither policies nor scores until it is answered."""
    query: ReviewQuery = asked.query
    opened = asked.store
    if query.group:
        pair, is_more = pair_of(opened, query.group), True
        if pair is None:
            raise NotFound(f"the group {query.group!r} has no two siblings to compare")
    else:
        pair, is_more = next_pair(asked.project, query.kind, query.after)
    return {
        "kind": query.kind,
        "agreement": asked.project.kept("agreement of people and judge", _FRESH_S, lambda: agreement(opened)),
        "item": pair and _shown(opened, pair),
        "is_more": is_more,  # whether another look may find a pair
        "answered": _revealed(opened, query.answered) if query.answered else None,
    }


def agreement(opened: store.Store) -> JSON:
    """Return how often the judge orders two siblings as people do, of the pairs on which it has a preference."""
    differ = rewards.disagreement(opened.evidence.opinions(rewards.PEOPLE))
    decided = differ.pairs - differ.tied
    agrees = decided - differ.against
    return asdict(differ) | {"decided": decided, "agrees": agrees, "share": agrees / decided if decided else None}


def _shown(opened: store.Store, pair: Pair) -> JSON:
    """Return a pair with what was said in both runs, and what people have said of them alone."""
    ids = [pair.left, pair.right]
    whole = {each.id: each for each in opened.read.trajectories(ids)}
    corrections = opened.evidence.corrections(ids)
    said = [transcript(whole[run]) if run in whole else () for run in ids]
    sides: list[JSON] = []
    for run, messages in zip(ids, said, strict=True):
        scores = {score.id: score.value for score in whole[run].scores} if run in whole else {}
        mine = [each.message for each in corrections.get(run, ()) if each.id == correction_id(run)]
        last = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
        sides.append(
            {
                "run": run,
                "thumb": scores.get(thumbs_id(run)),
                "corrected": bool(mine),
                "answer": _editable(mine[-1] if mine else last),
            }
        )
    return {"group": pair.group, "key": key_of(pair.group), "sides": sides, "compared": compared(*said)}


def _editable(message: JSON | None) -> str:
    """Return an answer as a person may change it: its text, or the message as JSON if it is more than a text."""
    if message is None:
        return ""
    content: Any = message.get("content")
    if isinstance(content, str) and not message.get("tool_calls"):
        return content
    return json.dumps(shallow({key: value for key, value in message.items() if value is not None}), indent=1)


def _revealed(opened: store.Store, group: str) -> JSON | None:
    """Return a pair with what people said, what the judge said, and who answered."""
    pair = pair_of(opened, group)
    if pair is None:
        return None
    ids = [pair.left, pair.right]
    scores, summaries = opened.groups.scores(ids), {each.id: each for each in opened.browse.summaries(ids)}
    sides: list[JSON] = []
    for run in ids:
        its = {score.id: score for score in scores.get(run, ())}
        judged = [one.value for one in its.values() if one.source == rewards.SCORE_SOURCE and one.group_id == group]
        given = its.get(score_id(group, run))
        summary = summaries.get(run)
        sides.append(
            {
                "run": run,
                "policies": list(summary.policies) if summary else [],
                "judged": judged[-1] if judged else None,
                "preferred": given.value if given else None,
            }
        )
    return {"group": group, "sides": sides, "agrees": _agrees(*sides)}


def _agrees(left: JSON, right: JSON) -> bool | None:
    """Return whether the judge prefers the run that a person preferred; `None` if one of them prefers none."""
    numbers = [left["preferred"], right["preferred"], left["judged"], right["judged"]]
    if None in numbers or numbers[0] == numbers[1] or numbers[2] == numbers[3]:
        return None
    return (numbers[0] > numbers[1]) == (numbers[2] > numbers[3])
