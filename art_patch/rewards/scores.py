"""Reads the stored scores of a trajectory: which of several counts, and what people said about it. Pure.

A trajectory may have several scores with the same name and source. The newest one counts; of two with the same time, it
is the one that comes later in the trajectory's `scores`. A score that is not a finite number is ignored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import combinations

from art_patch.types import Group, Score, Trajectory

# Name and source of the judge's scores.
SCORE_NAME = "ruler"
SCORE_SOURCE = "ruler"


def derived_id(*what: str) -> str:
    """Return a hash of these strings as a score's id, so that a score given again replaces the earlier one."""
    return hashlib.sha256("\0".join(what).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def with_scores(group: Group, scores: Iterable[Score]) -> Group:
    """Return the group with these scores added to its siblings; scores of other trajectories are ignored."""
    further: dict[str, list[Score]] = {}
    for score in scores:
        further.setdefault(score.trajectory_id, []).append(score)
    if not further:
        return group
    siblings = (replace(each, scores=(*each.scores, *further.get(each.id, ()))) for each in group.trajectories)
    return replace(group, trajectories=tuple(siblings))


def newest(trajectory: Trajectory, name: str, sources: Collection[str], *, group_id: str | None = None) -> float | None:
    """Return the value of the newest score with this name and one of these sources, or `None`.

    `group_id` restricts the search to scores that were given in that group, because a judge compares the siblings of
    one group only.
    """
    found: Score | None = None
    for score in trajectory.scores:
        if score.name != name or score.source not in sources or not math.isfinite(score.value):
            continue
        if (group_id is None or score.group_id == group_id) and (found is None or score.at >= found.at):
            found = score
    return None if found is None else found.value


# Names of scores that people give through `art.score` and the links of `art.feedback_url`; their source is `user`.
PEOPLE = ("thumbs", "rating", "satisfaction", "feedback")


def judged_G(group: Group) -> tuple[float | None, ...]:
    """Return the judge's score of each of the G siblings, given in this very group; `None` if it gave none."""
    return tuple(newest(each, SCORE_NAME, (SCORE_SOURCE,), group_id=group.id) for each in group.trajectories)


def satisfaction_G(group: Group) -> tuple[float | None, ...]:
    """Return how satisfied people were with each of the G siblings, from 0 to 1; `None` without feedback.

    Thumbs are stored as 0 and 1 or as -1 and 1, ratings as 0..1 or -1..1. So a negative value counts as 0, and a value
    outside of -1..1 is ignored, because its scale is unknown. If a sibling has feedback under several names, their mean
    counts.
    """
    return tuple(map(_satisfaction, group.trajectories))


def _satisfaction(trajectory: Trajectory) -> float | None:
    said = (newest(trajectory, name, ("user",)) for name in PEOPLE)
    values = [max(value, 0.0) for value in said if value is not None and -1 <= value <= 1]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How many pairs of siblings the judge orders the other way round than people's feedback does."""

    pairs: int = 0  # pairs of siblings with different feedback and a judge's score for both
    against: int = 0  # pairs that the judge orders the other way round
    tied: int = 0  # pairs with equal scores of the judge
    groups: int = 0  # groups that these pairs are from

    @property
    def share(self) -> float | None:
        """Share of the pairs that the judge orders the other way round than people do; `None` without pairs."""
        return self.against / self.pairs if self.pairs else None


def disagreement(groups: Iterable[Group]) -> Disagreement:
    """Count the pairs of siblings that the judge and people's feedback order differently.

    A pair consists of siblings of one group, because scores of different groups cannot be compared.
    """
    pairs = against = tied = counted = 0
    for group in groups:
        both = [
            (people, judge)
            for people, judge in zip(satisfaction_G(group), judged_G(group), strict=True)
            if people is not None and judge is not None
        ]
        found = 0
        for (people, judge), (other_people, other_judge) in combinations(both, 2):
            if people == other_people:
                continue
            found += 1
            tied += judge == other_judge
            against += (people - other_people) * (judge - other_judge) < 0
        pairs += found
        counted += found > 0
    return Disagreement(pairs, against, tied, counted)
