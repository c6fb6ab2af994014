"""Computes a trajectory's reward from its stored scores, by the one rule that the project chose (`criteria`). Pure.

`None` means that a trajectory has no reward; it never counts as zero. A reward of the rule `ruler` is not stored again,
because it is a stored score already. Rewards of the other two rules are stored (`kept_scores`) as a score named
`reward` with the source `combined`; the rule `criteria` also stores the value of each criterion.
`store/queries/browse.py` reads the same rewards in SQL. In names, G is the number of siblings in a group.

A trajectory may have several scores with the same name and source. The newest one counts; of two with the same time, it
is the one that comes later in the trajectory's `scores`. A score that is not a finite number is ignored.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from numbers import Real
from typing import Any

from art_patch._lib.ids import derived_id
from art_patch.errors import ConfigError
from art_patch.types import Group, Judgement, Score, Trajectory

# Name and source of the judge's scores.
SCORE_NAME = "ruler"
SCORE_SOURCE = "ruler"

# Names of scores that people give through `art.score` and the links of `art.feedback_url`; their source is `user`.
PEOPLE = ("thumbs", "rating", "satisfaction", "feedback")

# Name and sources of a reward that the user or the user's code gave.
REWARD_NAME = "reward"
REWARD_SOURCES = ("user", "code")
# Source of a reward that a combination made of other scores.
COMBINED = "combined"

# Source and name of a criterion's stored values, such as `criterion.accuracy`.
SOURCE = "criteria"
PREFIX = "criterion."

# Takes a group whose siblings hold all their scores; returns a number or `None` for each of the G siblings, in order.
Rule = Callable[[Group], Sequence[float | None]]

# --- stored scores ---


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
    """Return the value of the newest score of this name and one of these sources, in this group if given; or `None`."""
    found: Score | None = None
    for score in trajectory.scores:
        if score.name != name or score.source not in sources or not math.isfinite(score.value):
            continue
        if (group_id is None or score.group_id == group_id) and (found is None or score.at >= found.at):
            found = score
    return None if found is None else found.value


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
    """Count the pairs of siblings, within one group, that the judge and people's feedback order differently."""
    pairs: list[tuple[bool, bool]] = []  # whether the judge's order is the reverse, and whether it has none
    counted = 0
    for group in groups:
        both = zip(satisfaction_G(group), judged_G(group), strict=True)
        known = [(people, judge) for people, judge in both if people is not None and judge is not None]
        found = [((a - b) * (x - y) < 0, x == y) for (a, x), (b, y) in combinations(known, 2) if a != b]
        pairs += found
        counted += bool(found)
    return Disagreement(len(pairs), sum(against for against, _ in pairs), sum(tied for _, tied in pairs), counted)


# --- rewards ---


@dataclass(frozen=True, slots=True)
class Criterion:
    """One quantity that enters the reward, such as accuracy, with its weight and the rule that computes it."""

    name: str
    weight: float  # relative: weights need not add up to 1
    rule: Rule
    required: bool = False  # a sibling without a value has no reward at all
    version: str = ""  # of the rule, stored with its values

    def values_G(self, group: Group) -> tuple[float | None, ...]:
        """Return each sibling's value; `ConfigError` if the rule returns other things than 0..1 and `None`."""
        what = f"the rule of criterion {self.name!r}"
        values = _one_each(self.rule, group, what, "values")
        if wrong := [value for value in values if value is not None and not 0 <= value <= 1]:
            raise ConfigError(f"{what} gave {wrong[0]}; values go from 0 to 1, or are None")
        return values


def _one_each(rule: Rule, group: Group, what: str, unit: str) -> tuple[float | None, ...]:
    values = tuple(rule(group))
    if len(values) != len(group.trajectories):
        raise ConfigError(
            f"{what} gave {len(values)} {unit} for {len(group.trajectories)} siblings; "
            "it must give one for each, in their order, None for none"
        )
    if wrong := [value for value in values if not isinstance(value, Real | None)]:
        raise ConfigError(f"{what} gave {wrong[0]!r}; give a number, or None for none")
    return values


@dataclass(frozen=True, slots=True)
class Combination:
    """A rule that computes rewards from scores, as a project chose it, with its name and version."""

    name: str  # `ruler`, `criteria` or `module:function`
    rule: Rule
    criteria: tuple[Criterion, ...] = ()  # those that the rule weighs, if any
    version: str = "1"  # of the rule, stored with its results


def _given_or_ruler_G(group: Group) -> tuple[float | None, ...]:
    given = (newest(each, REWARD_NAME, REWARD_SOURCES) for each in group.trajectories)
    return tuple(judged if own is None else own for own, judged in zip(given, judged_G(group), strict=True))


RULER = Combination("ruler", _given_or_ruler_G)


def rewards_G(
    group: Group, scores: Iterable[Score] = (), *, combination: Combination = RULER
) -> tuple[float | None, ...]:
    """Return a finite reward or `None` for each of the G siblings, in the order of `group.trajectories`.

    `scores` are those that are not stored yet. Raises `ConfigError` if a user's function returned anything else.
    """
    rewards = _one_each(combination.rule, with_scores(group, scores), f"reward {combination.name!r}", "numbers")
    if wrong := [reward for reward in rewards if reward is not None and not math.isfinite(reward)]:
        raise ConfigError(f"reward {combination.name!r} gave {wrong[0]}; give a finite number, or None for none")
    return rewards


def noise_of_judges(second_passes: Iterable[Judgement]) -> dict[tuple[str, str], float]:
    """Return the standard deviation of the error in a judge's score, by (judge, rubric), from groups judged twice."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for each in second_passes:
        if "noise" in each.facts:
            squares, degrees = sums.get((each.judge, each.rubric), (0.0, 0))
            more = each.facts["siblings"] - 1
            sums[each.judge, each.rubric] = squares + more * each.facts["noise"] ** 2, degrees + more
    return {key: math.sqrt(squares / degrees) for key, (squares, degrees) in sums.items() if degrees}


def reward_noise(group: Group, noise: Mapping[tuple[str, str], float], *, combination: Combination = RULER) -> float:
    """Return how far a reward of this group is off (root mean square) if the judge's scores are off by their `noise`.

    `noise` is as `noise_of_judges` returns it. The rule is applied again to scores that are moved by it, so a reward
    that does not depend on the judge has noise 0.
    """
    moved = replace(group, trajectories=tuple(_moved(each, noise) for each in group.trajectories))
    if moved == group:
        return 0.0
    both = zip(*(rewards_G(each, combination=combination) for each in (group, moved)), strict=True)
    changes = [(after - before) ** 2 for before, after in both if before is not None and after is not None]
    return math.sqrt(math.fsum(changes) / len(changes)) if changes else 0.0


def _moved(trajectory: Trajectory, noise: Mapping[tuple[str, str], float]) -> Trajectory:
    def move(score: Score) -> Score:
        by = noise.get((score.judge or "", score.rubric or ""), 0.0) if score.source == SCORE_SOURCE else 0.0
        # Towards the middle: a score outside of 0..1 would be none.
        return replace(score, value=score.value + (by if score.value < 0.5 else -by)) if by else score

    return replace(trajectory, scores=tuple(map(move, trajectory.scores)))


def criterion_scores(group: Group, criteria: Sequence[Criterion], *, now: float | None = None) -> tuple[Score, ...]:
    """Return the criteria's values for each sibling as scores, which replace stored values of the same rule."""
    at = time.time() if now is None else now
    scores: list[Score] = []
    for one in criteria:
        about: dict[str, Any] = {"group_id": group.id, "rubric": one.version}
        for sibling, value in zip(group.trajectories, one.values_G(group), strict=True):
            if value is not None:
                key = derived_id(SOURCE, group.id, sibling.id, one.name, one.version)
                scores.append(Score(key, sibling.id, PREFIX + one.name, value, SOURCE, at, **about))
    return tuple(scores)


def kept_scores(
    group: Group, scores: Iterable[Score] = (), *, combination: Combination = RULER, now: float | None = None
) -> tuple[Score, ...]:
    """Return the scores to store at `now` for a group's rewards, with each criterion's values; none for `ruler`.

    They replace the group's earlier rewards, and earlier values of the same rules.
    """
    if combination is RULER:
        return ()
    at = time.time() if now is None else now
    whole = with_scores(group, scores)
    rewards = rewards_G(whole, combination=combination)
    about: dict[str, Any] = {"comment": combination.name, "group_id": group.id, "rubric": combination.version}
    results = tuple(
        Score(derived_id(COMBINED, group.id, sibling.id), sibling.id, REWARD_NAME, reward, COMBINED, at, **about)
        for sibling, reward in zip(group.trajectories, rewards, strict=True)
        if reward is not None
    )
    return (*criterion_scores(whole, combination.criteria, now=at), *results)
