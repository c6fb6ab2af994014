"""Whether a judge and the app's own signals agree that one policy is better than another. Pure.

A policy can learn to please the judge while its answers become worse. Then the judge's scores rise, and the app's own
rewards, its users' feedback or another judge's scores fall. So gate and canary show all of these gains side by side.
They name the disagreement as soon as it is proven, and until then they say how many values that takes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

from art_patch.gate.paired_test import NO_USERS, Pair, lower_bound, mean, scenario_means, spread, units_of
from art_patch.types import JSON

# Both limits of a gain hold together in 95 % of cases.
_SIDE = 0.975
# Of a disagreement as large as it seems: so often the number of values that is said to be needed shows it.
_POWER = 0.95


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one policy is than another by one signal, on a scale of 0 to 1, with limits."""

    name: str  # of the signal, in words
    mean: float
    low: float  # each limit is wrong in about 2.5 % of cases
    high: float
    count: int  # of the values behind it
    unit: str  # what is counted, such as "scenarios"
    sd: float  # of one value; `math.nan` if it is not known

    @property
    def words(self) -> str:
        """The gain and its limits for people."""
        return f"{self.name} {self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f}, {self.count} {self.unit})"

    @property
    def facts(self) -> JSON:
        """The gain as metrics; without `sd`, which may be no number and which JSON could not hold."""
        return {name: value for name, value in asdict(self).items() if name != "sd"}


def paired_gain(
    name: str, pairs: Sequence[Pair], *, user_of: Mapping[str, str | None] = NO_USERS, seed: int = 0
) -> Gain:
    """Return the gain from both policies' values of each turn, with the limits of the sign-flip test."""
    by_scenario = scenario_means(pairs)
    units, differences = units_of(by_scenario, user_of), [ours - theirs for ours, theirs in by_scenario.values()]
    low, high = (
        sign * lower_bound([sign * each for each in differences], _SIDE, units=units, seed=seed) for sign in (1, -1)
    )
    # Too few have no limits but those of the scale.
    return Gain(
        name, mean(differences), max(-1.0, low), min(1.0, high), len(differences), "scenarios",
        spread(differences, units),
    )  # fmt: skip


def normal_gain(name: str, values: Sequence[float], unit: str, *, is_enough: bool = True) -> Gain:
    """Return the gain from independent values whose mean is the gain, with limits in normal approximation.

    There are no limits but those of the scale if the values are not enough for the approximation, or all equal.
    """
    sd = spread(values)
    width = NormalDist().inv_cdf(_SIDE) * sd / math.sqrt(len(values)) if is_enough and sd > 0 else 2.0
    middle = min(1.0, max(-1.0, mean(values)))
    return Gain(name, middle, max(-1.0, middle - width), min(1.0, middle + width), len(values), unit, sd)


def agreement(judge: Gain, own: Gain) -> str | None:
    """Return in words that the judge's gain and another contradict each other, or how many values would tell.

    `None` if they do not differ in sign, or the judge sees no gain.
    """
    if judge.low > 0 > own.high:
        return f"{judge.name} and {own.name} disagree: the policy may please the judge alone"
    if judge.mean <= 0 or own.low > 0:
        return None
    # Of a value between -1 and 1 the standard deviation is at most 1.
    steps = (NormalDist().inv_cdf(_SIDE) + NormalDist().inv_cdf(_POWER)) * (own.sd if own.sd > 0 else 1.0) / judge.mean
    needed = math.ceil(steps**2)
    if own.count >= needed:
        return None
    return f"a loss in {own.name} as large as the gain in {judge.name} takes about {needed:,} {own.unit} to show"


def gains_in_words(judge: Gain, others: Sequence[Gain]) -> str:
    """Return all gains side by side and what they say of each other; empty without others."""
    if not others:
        return ""
    said = [words for each in others if (words := agreement(judge, each)) is not None]
    return "; ".join([f"gains: {', '.join(each.words for each in (judge, *others))}", *said])
