"""How far a mean difference can be trusted: a lower bound that keeps its promise with eight scenarios, ties and all.

The bound is the typical-value bound of Hartigan ("Using subsample values as typical values", JASA 64, 1969): the sorted
means of the subsets of the differences cut the line into pieces in which the true centre lies equally often, if each
difference is as likely to lie as far above it as below. It is the sign-flip permutation test, inverted: the bound lies
above a margin exactly if that test rejects the margin.

Where candidate and champion are equal, swapping their names changes nothing, so the differences are symmetric around
zero whatever the scores look like: the bound is then above zero at most as often as the level says, for every number
of scenarios. Beyond ten scenarios 1,999 random subsets stand for all; that keeps the level (Phipson and Smyth,
"Permutation p-values should never be zero", 2010). The documentation's
negative results say what was tried instead.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import compress
from statistics import NormalDist, stdev

_ALL_SUBSETS_UPTO = 10
_DRAWS = 1_999
_POWER = 0.8
"""How surely a difference as large as the one seen should be noticed with the scenarios that we ask for."""


def fewest(level: float) -> int:
    """Return how many differences a bound at this level needs: with fewer, not even all above zero say enough."""
    return math.ceil(math.log2(1 / (1 - level)) - 1e-9)


def mean(values: Sequence[float]) -> float:
    """Return the mean, the same for every order of the values."""
    return math.fsum(values) / len(values)


def lower_bound(differences: Sequence[float], level: float, *, seed: int = 0) -> float:
    """Return what the true mean difference is above with this confidence; minus infinity with too few to say.

    Args:
        differences: one for each scenario, finite, independent of each other.
        level: confidence of this one side.
        seed: of the subsets that are drawn.
    """
    if len(differences) < fewest(level):
        return -math.inf
    means = sorted(_subset_means(differences, seed))
    return means[int((1 - level) * len(means) + 1e-9)]


def scenarios_needed(differences: Sequence[float], margin: float, level: float) -> int | None:
    """Return with how many scenarios a difference like this one would probably be above the margin.

    Returns:
        `None` where more of the same would not help: the mean is not above the margin, or it cannot be said.
    """
    over = mean(differences) - margin
    if over <= 0 or len(differences) < 2:
        return None
    normal = NormalDist()
    steps = (normal.inv_cdf(level) + normal.inv_cdf(_POWER)) * stdev(differences) / over
    return max(len(differences) + 1, fewest(level), math.ceil(steps**2))


def _subset_means(values: Sequence[float], seed: int) -> Iterator[float]:
    """The mean of each subset, or of as many random ones; the empty one's lies below all."""
    count = len(values)
    if count <= _ALL_SUBSETS_UPTO:
        chosen: Iterator[int] = iter(range(2**count))
    else:
        rng = random.Random(seed)
        chosen = (rng.getrandbits(count) if draw else 0 for draw in range(_DRAWS + 1))
    for members in chosen:
        some = list(compress(values, map(int, f"{members:0{count}b}")))
        yield mean(some) if some else -math.inf
