"""The champion's answers against upstream's: how much better, between which limits.

Two ways, by what the scores mean. A reward that users or their code gave has one scale for all runs, so the means of
both are compared, with the interval of Agresti and Caffo ("Simple and effective confidence intervals for proportions",
The American Statistician 54, 2000) for any bounded value: one value at each end of the scale is added to either side.
A judge's score means something among siblings only, so each group that holds both gives one difference, and the limits
are those of `gate.bounds`, from both sides.

Only runs that one policy answered alone enter. Nobody's score is taken for zero.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance
from typing import Literal

from art_patch.gate import lower_bound
from art_patch.types import RunValue

LEVEL = 0.95
MIN_RUNS = 30
"""Rewarded runs that either side needs."""
MIN_GROUPS = 12
"""Groups judged with both in them that are needed."""
_MOST_GROUPS = 1_000  # beyond them limits get no narrower that matters, and take seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one kind of score says.

    Attributes:
        kind: `reward`, from users or code; `judged`, side by side with siblings.
        ours: the champion's mean; `None` where nothing is scored.
        theirs: upstream's.
        ours_scored: the champion's runs with such a score; for `judged`, groups that hold both.
        theirs_scored: upstream's; the same.
        low: the difference is above this with 97.5 % confidence; `None` with too few to say.
        high: and below this.
    """

    kind: Literal["reward", "judged"]
    ours: float | None
    theirs: float | None
    ours_scored: int
    theirs_scored: int
    low: float | None = None
    high: float | None = None

    @property
    def difference(self) -> float | None:
        """The champion's mean above upstream's; `None` where one of them is not scored."""
        return None if self.ours is None or self.theirs is None else self.ours - self.theirs


def compare_rewards(runs: Sequence[RunValue], champion: str | None) -> Comparison:
    """Compare what users and code gave the champion's runs and upstream's."""
    ours = [run.reward for run in runs if run.policy == champion and run.reward is not None and champion is not None]
    theirs = [run.reward for run in runs if run.policy is None and run.reward is not None]
    means = (fmean(ours) if ours else None, fmean(theirs) if theirs else None)
    if min(len(ours), len(theirs)) < MIN_RUNS:
        return Comparison("reward", *means, len(ours), len(theirs))
    return Comparison("reward", *means, len(ours), len(theirs), *difference_interval(ours, theirs))


def compare_judged(runs: Sequence[RunValue], champion: str | None) -> Comparison:
    """Compare both within each group that holds both; copies that were asked beside the app count there."""
    groups: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for run in runs:
        if run.group_id is not None and run.judged is not None and run.policy in (champion, None):
            groups[run.group_id][run.policy is None].append(run.judged)
    pairs = [(fmean(ours), fmean(theirs)) for ours, theirs in groups.values() if ours and theirs]
    pairs = pairs[-_MOST_GROUPS:]
    if champion is None or not pairs:
        return Comparison("judged", None, None, 0, 0)
    means = (fmean(ours for ours, _ in pairs), fmean(theirs for _, theirs in pairs))
    if len(pairs) < MIN_GROUPS:
        return Comparison("judged", *means, len(pairs), len(pairs))
    differences = [ours - theirs for ours, theirs in pairs]
    side = (1 + LEVEL) / 2
    low, high = lower_bound(differences, side), -lower_bound([-each for each in differences], side)
    return Comparison("judged", *means, len(pairs), len(pairs), low, high)


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return between which limits the difference of two means lies.

    Args:
        ours: values from 0 to 1; where some lie outside, the scale reaches to the smallest and the largest of them.
        theirs: the same.
    """
    low, high = min(0.0, *ours, *theirs), max(1.0, *ours, *theirs)
    a, b = ([*values, low, high] for values in (ours, theirs))
    middle = fmean(a) - fmean(b)
    # Of the mean of n values: n in place of n - 1, so that for shares it is the formula of the paper.
    error = math.sqrt(sum(variance(values) * (len(values) - 1) / len(values) ** 2 for values in (a, b)))
    width = NormalDist().inv_cdf((1 + LEVEL) / 2) * error
    return middle - width, middle + width
