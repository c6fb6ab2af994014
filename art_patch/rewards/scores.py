"""Stored scores of a trajectory: which one counts, and what people said. Pure.

A trajectory may have several scores of one name and source. The newest counts; of two equally new scores the later one
in the record. A score that is not a finite number is ignored.
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
    """Return an id that is always the same for these words, so that a score given again replaces the earlier one."""
    return hashlib.sha256("\0".join(what).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def with_scores(group: Group, scores: Iterable[Score]) -> Group:
    """Return the group with further scores of its siblings; scores of other trajectories are ignored."""
    further: dict[str, list[Score]] = {}
    for score in scores:
        further.setdefault(score.trajectory_id, []).append(score)
    if not further:
        return group
    siblings = (replace(each, scores=(*each.scores, *further.get(each.id, ()))) for each in group.trajectories)
    return replace(group, trajectories=tuple(siblings))


def newest(trajectory: Trajectory, name: str, sources: Collection[str], *, group_id: str | None = None) -> float | None:
    """Return the value of the newest score with this name and one of these sources, or `None`.

    `group_id` restricts it to scores given in that group: a judge's rank means something in one group only.
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
    """Return the judge's score in this very group for each of the G siblings; `None` without a score."""
    return tuple(newest(each, SCORE_NAME, (SCORE_SOURCE,), group_id=group.id) for each in group.trajectories)


def satisfaction_G(group: Group) -> tuple[float | None, ...]:
    """Return how satisfied people were with each of the G siblings, from 0 to 1; `None` without feedback.

    Thumbs are 0 and 1 or -1 and 1, ratings 0..1 or -1..1. So negative values count as 0, and values outside of -1..1
    are ignored, because their scale is unknown. Of several names the mean counts.
    """
    return tuple(map(_satisfaction, group.trajectories))


def _satisfaction(trajectory: Trajectory) -> float | None:
    said = (newest(trajectory, name, ("user",)) for name in PEOPLE)
    values = [max(value, 0.0) for value in said if value is not None and -1 <= value <= 1]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How often the judge orders two siblings the other way round than people do."""

    pairs: int = 0  # pairs of siblings with different feedback and a judge's score for both
    against: int = 0  # pairs that the judge orders the other way round
    tied: int = 0  # pairs with equal scores of the judge
    groups: int = 0  # groups that these pairs are from

    @property
    def share(self) -> float | None:
        """Share of the pairs that the judge orders the other way round; `None` without pairs."""
        return self.against / self.pairs if self.pairs else None


def disagreement(groups: Iterable[Group]) -> Disagreement:
    """Compare the judge with people over pairs of siblings; scores of different groups cannot be compared."""
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
