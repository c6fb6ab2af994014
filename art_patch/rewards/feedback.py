"""What people said of runs: as one number from 0 to 1, and where it differs from what the judge said. Pure.

People's scores are those that came from users (`source` is `user`) under the names in `PEOPLE`; `art.score` and the
links of `art.feedback_url` write them. Their scales differ: thumbs are 0 and 1, or -1 and 1; ratings go from 0 to 1 or
from -1 to 1. So what is negative counts as 0, what is above 1 or below -1 has no known scale and is passed over. Of
several names the mean counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from art_patch.rewards.judge.ruler import SCORE_NAME, SCORE_SOURCE
from art_patch.rewards.latest_score import newest
from art_patch.types import Group, Trajectory

PEOPLE = ("thumbs", "rating", "satisfaction", "feedback")


def satisfaction_G(group: Group) -> tuple[float | None, ...]:
    """Return how satisfied people were with each of the G siblings, 0..1; `None` where nobody said anything."""
    return tuple(map(_satisfaction, group.trajectories))


def _satisfaction(trajectory: Trajectory) -> float | None:
    said = (newest(trajectory, name, ("user",)) for name in PEOPLE)
    values = [max(value, 0.0) for value in said if value is not None and -1 <= value <= 1]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How often the judge orders siblings as people do not.

    Attributes:
        pairs: of siblings that people told apart and the judge has scored.
        against: those that the judge orders the other way round.
        tied: those that the judge scored alike.
        groups: that these pairs are from.
    """

    pairs: int = 0
    against: int = 0
    tied: int = 0
    groups: int = 0

    @property
    def share(self) -> float | None:
        """Part of the pairs that the judge orders the other way round; `None` without pairs."""
        return self.against / self.pairs if self.pairs else None


def disagreement(groups: Iterable[Group]) -> Disagreement:
    """Compare the judge with people, pair by pair; only siblings of one group can be compared.

    Args:
        groups: with the scores of their siblings; their calls are not looked at.
    """
    pairs = against = tied = counted = 0
    for group in groups:
        judged = (newest(each, SCORE_NAME, (SCORE_SOURCE,), group_id=group.id) for each in group.trajectories)
        both = [
            (people, judge)
            for people, judge in zip(satisfaction_G(group), judged, strict=True)
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
