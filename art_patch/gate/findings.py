"""What a check of the gate found, as one row of data, and the rule of those that ask whether something got worse.

Nothing got worse if even the worst that the differences leave open is within what is allowed (non-inferiority). With
too few scenarios for such a bound nothing may have got worse at all. What is not a number fails.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from art_patch.gate.bounds import lower_bound, mean

TIE = 1e-9
"""Means of the same numbers in another order differ by less; no score is as fine."""

Pair = tuple[str, float, float]
"""Scenario key, candidate's metric and champion's, of one turn."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a candidate.

    Attributes:
        name: of the check.
        candidate: its metric; `None` where there is none.
        champion: the champion's.
        bound: what was compared with the candidate's metric, or with how much worse it may be; `None` if nothing was.
        passed: a candidate that fails one is rejected, however well it scores.
        words: the same for a reader.
    """

    name: str
    candidate: float | None
    champion: float | None
    bound: float | None
    passed: bool
    words: str


def scenario_means(pairs: Iterable[Pair]) -> list[tuple[float, float]]:
    """Return candidate's and champion's mean of each scenario, in the order the scenarios first come up."""
    ours: dict[str, list[float]] = defaultdict(list)
    theirs: dict[str, list[float]] = defaultdict(list)
    for key, of_candidate, of_champion in pairs:
        ours[key].append(of_candidate)
        theirs[key].append(of_champion)
    return [(mean(ours[key]), mean(theirs[key])) for key in ours]


def not_worse(
    name: str, pairs: Iterable[Pair], *, allowed: float, level: float, seed: int = 0, less_is_better: bool = False
) -> Finding:
    """Return whether the candidate is at most so much worse, with confidence.

    Args:
        name: of what is compared.
        pairs: metrics of both for each turn; the scenario is the unit.
        allowed: how much worse it may be, in the metrics' own unit.
        level: confidence.
        seed: of the subsets that the bound is taken from.
        less_is_better: whether a smaller metric is the better one.
    """
    by_scenario = scenario_means(pairs)
    if not by_scenario:
        return Finding(name, None, None, allowed, False, f"{name}: nothing to compare")
    ours, theirs = mean([a for a, _ in by_scenario]), mean([b for _, b in by_scenario])
    if not all(math.isfinite(metric) for both in by_scenario for metric in both):
        return Finding(name, None, None, allowed, False, f"{name}: a metric is not finite")
    sign = -1.0 if less_is_better else 1.0
    better = [sign * (a - b) for a, b in by_scenario]
    bound = lower_bound(better, level, seed=seed)
    words = f"{name} {ours:.3g} against {theirs:.3g}"
    if math.isinf(bound):
        passed = mean(better) >= -TIE
        rule = f"on {len(better)} scenarios, too few to allow anything worse"
    else:
        passed = bound > -allowed - TIE
        rule = f"worse by at most {max(0.0, -bound):.3g} with {level:.0%} confidence, {allowed:g} is allowed"
    return Finding(name, ours, theirs, allowed, passed, f"{words}: {rule}")
