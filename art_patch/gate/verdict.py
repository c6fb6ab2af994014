"""Scores of both policies on the same turns -> does the candidate win?"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from art_patch.records import JSON


@dataclass(frozen=True, slots=True)
class GateConfig:
    """When a candidate wins.

    Attributes:
        min_scenarios: fewer held-out scenarios than this reject.
        max_scenarios: at most this many are asked.
        turns_per_scenario: at most this many turns of each.
        samples: answers of each policy to each turn.
        level: confidence of the one-sided lower bound.
        margin: the lower bound must lie above it.
        max_unscored: a larger share of turns that the judge could not score rejects.
    """

    min_scenarios: int = 8
    max_scenarios: int = 64
    turns_per_scenario: int = 2
    samples: int = 4
    level: float = 0.95
    margin: float = 0.0
    max_unscored: float = 0.1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate wins, and why, in words and figures."""

    promote: bool
    reason: str
    figures: JSON


def decide(scores: Iterable[tuple[str, float, float]], config: GateConfig, *, seed: int = 0) -> Verdict:
    """Decide from paired scores.

    Args:
        scores: `(scenario key, candidate's mean score, champion's mean score)` for each turn.
        config: when the candidate wins.
        seed: of the bootstrap.

    The unit is the scenario: turns of one scenario are not independent. The bound is the percentile bootstrap's
    (Efron 1979) over scenarios, 2,000 draws.
    """
    candidate: dict[str, list[float]] = defaultdict(list)
    champion: dict[str, list[float]] = defaultdict(list)
    for key, ours, theirs in scores:
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            return Verdict(False, f"a score of scenario {key} is not finite", {"scenarios": 0})
        candidate[key].append(ours)
        champion[key].append(theirs)
    differences = [_mean(candidate[key]) - _mean(champion[key]) for key in candidate]
    figures: dict[str, float | int] = {"scenarios": len(differences)}
    if len(differences) < config.min_scenarios:
        missing = config.min_scenarios - len(differences)
        return Verdict(False, f"{len(differences)} held-out scenarios; {missing} more are needed", figures)
    figures["candidate"] = _mean([_mean(values) for values in candidate.values()])
    figures["champion"] = _mean([_mean(values) for values in champion.values()])
    figures["difference"] = _mean(differences)
    figures["lower_bound"] = bound = _lower_bound(differences, config.level, seed)
    wins = bound > config.margin
    reason = (
        f"scores {figures['candidate']:.3f} against {figures['champion']:.3f} "
        f"on {len(differences)} held-out scenarios; "
        f"the difference is above {bound:+.3f} with {config.level:.0%} confidence, "
        f"{'above' if wins else 'not above'} the margin {config.margin:g}"
    )
    return Verdict(wins, reason, figures)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _lower_bound(values: list[float], level: float, seed: int, draws: int = 2_000) -> float:
    rng = random.Random(seed)
    means = sorted(_mean(rng.choices(values, k=len(values))) for _ in range(draws))
    return means[int((1 - level) * draws)]
