"""Chooses which two siblings a person compares next.

The queue is made anew for each request, from the newest groups, by index alone; nothing is stored but the answers. A
group has one pair. Of a group on which the judge was asked twice and turned some siblings around, it is the pair that
it turned most; of any other, a hash chooses it. So nothing that is known of the runs decides who is compared. A group
leaves the queue when both runs of its pair have a score of `score_id`.

`pairs` takes the groups in an order that a hash makes; `unsure` takes those first on which the judge disagreed most
with itself. Siblings that say the same are not compared, since nobody can prefer one of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

from art_patch import rewards, store
from art_patch._lib.ids import derived_id
from art_patch.web.projects import Project

PREFERENCE = "feedback"
"""Name of the scores that a preference becomes, one of `rewards.PEOPLE`: 1 for the better run, 0 for the other."""

_WINDOW = 100  # groups that are read together, newest first
_WINDOWS = 5
_SOME = 10  # groups whose runs are read together
_RUNS = 16  # siblings of a group among which a pair is looked for
_MOST_TRIED = 20  # groups without a pair that one request looks at
_FRESH_S = 30.0

Kind = Literal["pairs", "unsure"]


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
