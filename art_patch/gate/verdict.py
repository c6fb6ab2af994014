"""Scores of both policies on the same turns -> does the candidate win?

The unit is the scenario: turns of one scenario are not independent, so their mean counts once. The candidate wins if
the lower bound of the mean difference (`bounds`) is above the margin. What cannot be said rejects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from art_patch.gate.bounds import fewest, lower_bound, mean, scenarios_needed
from art_patch.gate.config import GateConfig
from art_patch.gate.findings import TIE, Finding, Pair, scenario_means
from art_patch.types import JSON


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate wins, and why, in words and metrics."""

    promote: bool
    reason: str
    metrics: JSON


def decide(scores: Iterable[Pair], config: GateConfig, *, seed: int = 0) -> Verdict:
    """Decide from paired scores.

    Args:
        scores: `(scenario key, candidate's mean score, champion's mean score)` for each turn.
        config: when the candidate wins.
        seed: of the subsets that the bound is taken from.
    """
    pairs = list(scores)
    for key, ours, theirs in pairs:
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            return Verdict(False, f"a score of scenario {key} is not finite", {"scenarios": 0})
    by_scenario = scenario_means(pairs)
    count, least = len(by_scenario), max(config.min_scenarios, fewest(config.level))
    if count < least:
        metrics = {"scenarios": count, "more_needed": least - count}
        return Verdict(False, f"{count} held-out scenarios; {least - count} more are needed", metrics)
    differences = [ours - theirs for ours, theirs in by_scenario]
    bound = lower_bound(differences, config.level, seed=seed)
    metrics = {
        "scenarios": count,
        "candidate": mean([ours for ours, _ in by_scenario]),
        "champion": mean([theirs for _, theirs in by_scenario]),
        "difference": mean(differences),
        "lower_bound": bound,
    }
    wins = bound > config.margin + TIE
    tied = all(abs(difference) <= TIE for difference in differences)
    needed = None if wins or tied else scenarios_needed(differences, config.margin, config.level)
    if needed is not None:
        metrics["more_needed"] = needed - count
    return Verdict(wins, _reason(metrics, config, wins, tied), metrics)


def with_findings(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """Return the verdict on the scores, turned down if any check failed; every reason is said."""
    failed = [finding.words for finding in findings if not finding.passed]
    if not failed:
        return verdict
    lead = "it wins, but" if verdict.promote else "besides,"
    return replace(verdict, promote=False, reason=f"{verdict.reason}; {lead} {'; '.join(failed)}")


def _reason(metrics: JSON, config: GateConfig, wins: bool, tied: bool) -> str:
    if tied:
        return f"a tie: both score alike on each of {metrics['scenarios']} held-out scenarios, not above the margin"
    words = (
        f"scores {metrics['candidate']:.3f} against {metrics['champion']:.3f} "
        f"on {metrics['scenarios']} held-out scenarios; "
        f"the difference is above {metrics['lower_bound']:+.3f} with {config.level:.0%} confidence, "
        f"{'above' if wins else 'not above'} the margin {config.margin:g}"
    )
    more = metrics.get("more_needed")
    return words if more is None else f"{words}; if it is as it looks, about {more} more scenarios would show it"
