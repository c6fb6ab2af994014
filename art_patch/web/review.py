"""The page on which people compare two siblings of a group, without who answered and what the judge said.

The queue is made anew for each request, from the newest groups, by index alone; nothing is stored but the answers. A
group has one pair. Of a group on which the judge was asked twice and turned some siblings around, it is the pair that
it turned most; of any other, a hash chooses it. So nothing that is known of the runs decides who is compared. A group
leaves the queue when both runs of its pair have a score of `score_id`.

`pairs` takes the groups in an order that a hash makes; `unsure` takes those first on which the judge disagreed most
with itself. Siblings that say the same are not compared, since nobody can prefer one of them.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from art_patch import rewards, store
from art_patch._lib.ids import derived_id
from art_patch._lib.loose_json import shallow
from art_patch.errors import NotFound
from art_patch.trajectories import transcript
from art_patch.types import JSON
from art_patch.web.projects import Asked, Project, Query
from art_patch.web.word_diff import compared

PREFERENCE = "feedback"
"""Name of the scores that a preference becomes, one of `rewards.PEOPLE`: 1 for the better run, 0 for the other."""

_WINDOW = 100  # groups that are read together, newest first
_WINDOWS = 5
_SOME = 10  # groups whose runs are read together
_RUNS = 16  # siblings of a group among which a pair is looked for
_MOST_TRIED = 20  # groups without a pair that one request looks at
_FRESH_S = 30.0

Kind = Literal["pairs", "unsure"]


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
        about = {"thumb": scores.get(thumbs_id(run)), "corrected": bool(mine)}
        sides.append({"run": run, **about, "answer": _editable(mine[-1] if mine else last)})
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
        given, summary = its.get(score_id(group, run)), summaries.get(run)
        said = {"judged": judged[-1] if judged else None, "preferred": given.value if given else None}
        sides.append({"run": run, "policies": list(summary.policies) if summary else [], **said})
    return {"group": group, "sides": sides, "agrees": _agrees(*sides)}


def _agrees(left: JSON, right: JSON) -> bool | None:
    """Return whether the judge prefers the run that a person preferred; `None` if one of them prefers none."""
    numbers = [left["preferred"], right["preferred"], left["judged"], right["judged"]]
    if None in numbers or numbers[0] == numbers[1] or numbers[2] == numbers[3]:
        return None
    return (numbers[0] > numbers[1]) == (numbers[2] > numbers[3])


# --- the queue ---


class Pair(NamedTuple):
    """Two siblings of a group, on the sides on which they are shown."""

    group: str
    left: str
    right: str


def score_id(group: str, run: str) -> str:
    """Return the id of the score that a preference gives this run; another answer replaces it."""
    return derived_id("review", group, run, PREFERENCE)


def key_of(group: str) -> str:
    """Return the place of a group in the order of the hash."""
    return derived_id("review", group)


def pair_of(opened: store.Store, group: str) -> Pair | None:
    """Return the pair of a group; `None` if it has no two siblings that may be learned from and differ."""
    return _pairs(opened, opened.groups.members([group])).get(group)


def next_pair(project: Project, kind: Kind, after: str | None) -> tuple[Pair | None, bool]:
    """Return a pair that nobody has answered yet, if there is one, and whether there may be more groups to look at.

    `after` is the key of a group that is skipped: it comes last.
    """
    # Groups whose siblings say the same never leave the queue; so they are remembered, or each request would read them.
    alike = project.alike
    tried = 0
    for members in _windows(project, kind, after):
        waiting = _unanswered(project.store, {group: runs for group, runs in members.items() if group not in alike})
        for start in range(0, len(waiting), _SOME):
            some = dict(list(waiting.items())[start : start + _SOME])
            found = _pairs(project.store, some)
            for group in some:
                if group in found:
                    return found[group], True
                alike.add(group)
            tried += len(some)
            if tried >= _MOST_TRIED:
                return None, True
    return None, False


def _windows(project: Project, kind: Kind, after: str | None) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield groups with their runs, in the order in which they are asked about."""
    groups = project.store.groups
    if kind == "unsure":
        unsure = project.kept("groups that the judge is unsure of", _FRESH_S, lambda: _unsure(project.store))
        skipped = sum(place for place, group in enumerate(unsure, 1) if key_of(group) == after)
        yield groups.members(unsure[skipped:] + unsure[:skipped])
        return
    before = None
    for _ in range(_WINDOWS):
        members = groups.to_review(before=before, limit=_WINDOW)
        if not members:
            return
        before = min(members)
        order = sorted(members, key=lambda group: (after is not None and key_of(group) <= after, key_of(group)))
        yield {group: members[group] for group in order}


def _unanswered(opened: store.Store, members: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    answered = opened.groups.there({score_id(group, run) for group, runs in members.items() for run in runs})
    return {
        group: runs
        for group, runs in members.items()
        if sum(score_id(group, run) in answered for run in runs) < 2 <= len(runs)
    }


def _pairs(opened: store.Store, members: Mapping[str, Sequence[str]]) -> dict[str, Pair]:
    """Return the pair of each of these groups that has one."""
    seconds = opened.groups.second_passes(list(members))
    turned: dict[str, tuple[str, ...]] = {}
    drawn: dict[str, list[str]] = {}
    for group, runs in members.items():
        turned[group] = _most_turned(rewards.both_ways(seconds.get(group, {}), group, runs))
        drawn[group] = sorted(runs, key=lambda run, of=group: derived_id("review", of, run, "draw"))[:_RUNS]
    ends = opened.groups.ends([run for its in (turned, drawn) for runs in its.values() for run in runs])
    found: dict[str, Pair] = {}
    for group in members:
        two = _distinct(turned[group], ends) or _distinct(drawn[group], ends)
        if two:
            left, right = sorted(two, key=lambda run, of=group: derived_id("review", of, run, "side"))
            found[group] = Pair(group, left, right)
    return found


def _distinct(runs: Iterable[str], ends: Mapping[str, Hashable]) -> list[str]:
    """Return the first two runs that do not say the same, or none; those without an answer are left out."""
    by_end: dict[Hashable, str] = {}
    for run in runs:
        if run in ends:
            by_end.setdefault(ends[run], run)
    first = list(by_end.values())[:2]
    return first if len(first) == 2 else []


def _most_turned(ways: Mapping[str, tuple[float, float]]) -> tuple[str, ...]:
    """Return the two siblings that the judge turned around most between its two orders; none if it turned none."""

    def turned(one: str, other: str) -> float:
        before, after = (ways[one][way] - ways[other][way] for way in (0, 1))
        return min(abs(before), abs(after)) if before * after < 0 else 0.0

    most = max(combinations(sorted(ways), 2), key=lambda two: turned(*two), default=None)
    return most if most and turned(*most) > 0 else ()


def _unsure(opened: store.Store) -> list[str]:
    """Return groups whose scores differ between the judge's two orders, those with the largest difference first."""
    seconds = opened.evidence.second_passes()
    # Without a noise, the judge disagreed with itself, and the group was put into quarantine.
    noise = {each.group_id: float(each.facts.get("noise", "inf")) for each in reversed(seconds)}
    return sorted((group for group, size in noise.items() if size > 0), key=lambda group: -noise[group])
