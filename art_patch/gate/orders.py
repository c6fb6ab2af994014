"""One judgement for each order that the answers were shown in -> scores without what the place gave.

A judge that prefers what stands first or last gives that to one policy in the one order and to the other in the
reverse. Their mean is without it, and how often the two orders name different winners says how much it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from art_patch.gate.bounds import mean
from art_patch.gate.findings import TIE, Pair
from art_patch.gate.turns import Turn
from art_patch.types import Group

Contest = tuple[Turn, Group, frozenset[str]]
"""A turn, both policies' answers as one group, and the ids of those that the candidate gave."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of judging.

    Attributes:
        pairs: mean score of both policies' answers over all orders, for each turn that was scored whole.
        unscored: scenario keys of the turns that were not, in any of the orders.
        order_disagreement: share of the turns in which one order prefers the candidate and the other the champion;
            `None` with one order or nothing scored.
    """

    pairs: tuple[Pair, ...]
    unscored: tuple[str, ...]
    order_disagreement: float | None


def merge_orders(contests: Sequence[Contest], orders: Sequence[Mapping[str, float]]) -> Judged:
    """Merge what the judge said in each order.

    Args:
        contests: what was judged.
        orders: trajectory id -> score, for each order; finite scores count, and a turn counts with all of them.
    """
    pairs: list[Pair] = []
    unscored: list[str] = []
    flips = 0
    for turn, group, ours in contests:
        found = [_means(group, ours, values) for values in orders]
        means = [both for both in found if both is not None]
        if len(means) < len(orders) or not means:
            unscored.append(turn.scenario_key)
            continue
        pairs.append((turn.scenario_key, mean([a for a, _ in means]), mean([b for _, b in means])))
        differences = [a - b for a, b in means]
        flips += min(differences) < -TIE and max(differences) > TIE
    disagreement = flips / len(pairs) if pairs and len(orders) > 1 else None
    return Judged(tuple(pairs), tuple(unscored), disagreement)


def _means(group: Group, ours: frozenset[str], values: Mapping[str, float]) -> tuple[float, float] | None:
    """Candidate's and champion's mean score; `None` unless every answer has one, and each policy an answer."""
    scores = [(sibling.id in ours, values.get(sibling.id, math.nan)) for sibling in group.trajectories]
    by_us = [score for is_ours, score in scores if is_ours]
    by_them = [score for is_ours, score in scores if not is_ours]
    if not by_us or not by_them or not all(math.isfinite(score) for _, score in scores):
        return None
    return mean(by_us), mean(by_them)
