"""The gate's settings and statistics: is the candidate better than the champion on the held-out scenarios?

In: the judge's scores of both policies on the same turns. Out: a verdict with its reason and metrics. Pure.

- **Unit.** The unit is the scenario. Turns of one scenario are not independent, so only their mean counts. For each
  scenario the test uses one difference: the candidate's mean minus the champion's, on the judge's scale from 0 to 1.
- **Superiority test** (`decide`). The null hypothesis is that the candidate is better than the champion by at most
  `margin`. The candidate wins if the one-sided lower confidence bound of the mean difference lies above `margin`.
- **Error rate.** A candidate that is equal to the champion wins in at most `1 - level` (5 %) of the gate runs: type I
  error. This holds exactly for every number of scenarios. Each further gate run of a candidate takes the same risk.
- **Non-inferiority tests** (`not_worse`) compare other metrics, each at the same level. The candidate must pass all of
  them, so the level needs no correction for their number (intersection-union test; Berger, Technometrics 24, 1982).
- **Position-bias correction** (`merge_orders`). The judge sees each group in one order and in the reverse order, and
  the mean of both scores counts (Wang et al. 2023, https://arxiv.org/abs/2305.17926).
- **Fails closed.** Too few scenarios, a score that is not finite, or a tie of the policies reject the candidate.

The bound (`lower_bound`) inverts the sign-flip permutation test: the bound lies above a number exactly if that test
rejects the number as the mean difference. If candidate and champion are equal, swapping their names changes nothing, so
the differences are symmetric around zero whatever the scores look like. The test assumes nothing else.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import NormalDist, stdev
from typing import Literal

from art_patch.errors import ConfigError
from art_patch.gate.turns import BlindComparison, Turn
from art_patch.types import JSON, Group

# (scenario key, candidate's metric, champion's metric) of one turn.
Pair = tuple[str, float, float]

# Means of the same numbers in another order differ by less than this, and no judge scores as finely. Without it,
# rounding would decide a tie.
TIE = 1e-9

# 2 ** 10 subsets are enumerated; beyond, a random sample of subsets keeps the time bounded.
_ALL_SUBSETS_UPTO = 10
# With the empty subset these are 2,000, so that 1 % and 5 % of them are whole numbers.
_DRAWS = 1_999


@dataclass(frozen=True, slots=True)
class CollapseConfig:
    """How far the candidate's answers may differ from the champion's, however high its scores are (see `collapse`)."""

    # Neither policy may write more than this many times as much as the other.
    max_length_ratio: float = 4.0
    # The probability that answers to two different scenarios are identical: at most this, ...
    max_same: float = 0.5
    # ... or this much more than the champion's, whichever is higher.
    max_same_rise: float = 0.25
    # How much higher its entropy for each token may be, in nats.
    max_entropy_rise_nats: float = 1.0
    # KL divergence per token from the policy before training, in nats; training stops at `TrainConfig.max_kl_nats`.
    max_kl_nats: float = 2.0
    # Its median answer may take this many times as long.
    max_latency_ratio: float = 2.0


@dataclass(frozen=True, slots=True)
class GateConfig:
    """The gate's settings: which prompts both policies answer, and when the candidate wins."""

    # With fewer scored held-out scenarios the candidate is rejected. The level needs some as well (`fewest`).
    min_scenarios: int = 8
    # At most this many scenarios are asked, and this many turns of each.
    max_scenarios: int = 64
    turns_per_scenario: int = 2
    # Answers of each policy to each turn.
    samples: int = 4
    # Whole runs of each policy, for scenarios whose runs can be repeated. The scenario is the unit of the test, so more
    # scenarios tell more than more runs of each.
    run_samples: int = 2
    # How often the judge sees each turn. 2 adds the reverse order: no position bias, at twice the cost of judging.
    orders: Literal[1, 2] = 2
    # Confidence of the lower bound. A candidate equal to the champion is promoted in at most 1 - level of gate runs.
    level: float = 0.95
    # The lower bound of the score difference must lie above this. Below 0, the candidate may be that much worse.
    margin: float = 0.0
    # A larger share of turns without a judge's score rejects, or of answers on which a user's check failed.
    max_unscored: float = 0.1
    # Largest loss, with confidence `level`, in every metric that must not get worse: the judge's scores on the suite,
    # user checks (scaled to 0..1), and the shares of empty, refused, malformed, cut-off and repetitive answers.
    max_worse: float = 0.1
    # Runs of users who arrived within this many seconds are not asked about, so that no newcomer can steer a promotion.
    new_user_s: float = 86_400.0
    # Largest share of the scenarios that belong to one user alone, see `held_out_turns`.
    max_user_share: float = 0.25
    # Prompts that every candidate is asked (`read_suite`).
    suite: tuple[Turn, ...] = ()
    # `None` switches all checks of `collapse` off.
    collapse: CollapseConfig | None = field(default_factory=CollapseConfig)

    def __post_init__(self) -> None:
        """Refuse numbers that would promote every candidate, or none: `ConfigError`."""
        if not 0.5 <= self.level < 1:
            raise ConfigError(f"the gate's level is {self.level:g}; give a confidence from 0.5 to below 1")
        if not -1 <= self.margin < 1:
            raise ConfigError(
                f"the gate's margin is {self.margin:g}; scores lie in 0..1, so give one from -1 to below 1"
            )
        if self.orders not in (1, 2):
            raise ConfigError(f"the gate's orders are {self.orders}; there are 2, an order and its reverse, or give 1")
        for name in ("max_unscored", "max_worse", "max_user_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"the gate's {name} is {getattr(self, name):g}; give a share from 0 to 1")
        for name in ("min_scenarios", "max_scenarios", "turns_per_scenario", "samples", "run_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the gate's {name} is {getattr(self, name)}; give 1 or more")


# --- the confidence bound ---


def fewest(level: float) -> int:
    """Return the smallest number of scenarios with which `lower_bound` is finite at this confidence level.

    The signs of n differences can be flipped in 2 ** n ways, so the smallest p-value is 1 / 2 ** n; 95 % needs five.
    """
    return math.ceil(math.log2(1 / (1 - level)) - 1e-9)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; every order of the values gives the same bits."""
    return math.fsum(values) / len(values)


def lower_bound(differences: Sequence[float], level: float, *, seed: int = 0) -> float:
    """Return the one-sided lower confidence bound of the mean of paired differences; -infinity for too few (`fewest`).

    This is the typical-value bound (Hartigan, "Using subsample values as typical values", JASA 64, 1969): the sorted
    means of all subsets cut the line into intervals, and each interval holds the true centre with the same probability.

    Args:
        differences: one for each scenario; finite, independent and symmetric around their mean.
        level: confidence level of this one-sided bound, such as 0.95.
        seed: draws random subsets if there are more than ten differences; up to ten, all subsets are used.
    """
    if len(differences) < fewest(level):
        return -math.inf
    means = sorted(_subset_means(differences, seed))
    # Rounded down: conservative where the level is between two steps. 1e-9 mends (1 - 0.9) * 2000 = 199.99...
    return means[int((1 - level) * len(means) + 1e-9)]


def _subset_means(values: Sequence[float], seed: int) -> Iterator[float]:
    count = len(values)
    if count <= _ALL_SUBSETS_UPTO:
        chosen: Iterator[int] = iter(range(2**count))
    else:
        # The empty subset, the observed arrangement, is always in the sample. Without it the test would be wrong more
        # often than the level says (Phipson and Smyth, "Permutation p-values should never be zero", 2010).
        rng = random.Random(seed)
        chosen = (rng.getrandbits(count) if draw else 0 for draw in range(_DRAWS + 1))
    for members in chosen:
        some = list(compress(values, map(int, f"{members:0{count}b}")))
        yield mean(some) if some else -math.inf


def scenarios_needed(differences: Sequence[float], margin: float, level: float) -> int | None:
    """Return how many scenarios would probably prove that a mean difference like the observed one is above the margin.

    This is the sample size for a power of 80 % in normal approximation, ((z_level + z_power) * s / effect) ** 2. `None`
    if more would not help: the observed mean is not above the margin, or its spread is unknown.
    """
    over = mean(differences) - margin
    if over <= 0 or len(differences) < 2:
        return None
    z_level, z_power = map(NormalDist().inv_cdf, (level, 0.8))
    steps = (z_level + z_power) * stdev(differences) / over
    return max(len(differences) + 1, fewest(level), math.ceil(steps**2))


# --- non-inferiority ---


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of a candidate. A candidate that fails a check is rejected, however high it scores."""

    name: str
    # Both policies' values of the checked metric; `None` where it could not be measured.
    candidate: float | None
    champion: float | None
    # The limit of the candidate's value, or of how much worse it may be. `None` for a metric that is only reported.
    bound: float | None
    passed: bool
    # The same as one sentence for people.
    words: str


def scenario_means(pairs: Iterable[Pair]) -> list[tuple[float, float]]:
    """Return (mean of the candidate, mean of the champion) for each scenario, averaged over its turns."""
    turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, of_candidate, of_champion in pairs:
        turns[key].append((of_candidate, of_champion))
    return list(map(_means_of, turns.values()))


def _means_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    ours, theirs = zip(*pairs, strict=True)
    return mean(ours), mean(theirs)


def not_worse(
    name: str, pairs: Iterable[Pair], *, allowed: float, level: float, seed: int = 0, less_is_better: bool = False
) -> Finding:
    """Test non-inferiority: is the candidate worse than the champion by at most `allowed`, with confidence `level`?

    If the candidate is worse by more than that, the test wrongly passes it in at most `1 - level` of the cases. `pairs`
    has both policies' values of the metric for each turn; turns of one scenario are averaged first.
    """
    by_scenario = scenario_means(pairs)
    if not by_scenario:
        return Finding(name, None, None, allowed, False, f"{name}: nothing to compare")
    ours, theirs = _means_of(by_scenario)
    if not all(math.isfinite(metric) for both in by_scenario for metric in both):
        return Finding(name, None, None, allowed, False, f"{name}: a metric is not finite")
    sign = -1.0 if less_is_better else 1.0
    better = [sign * (a - b) for a, b in by_scenario]
    bound = lower_bound(better, level, seed=seed)
    words = f"{name} {ours:.3g} against {theirs:.3g}"
    if math.isinf(bound):
        # No bound at this level exists for so few scenarios, so the observed mean decides, and no loss is allowed.
        passed = mean(better) >= -TIE
        rule = f"on {len(better)} scenarios, too few to allow anything worse"
    else:
        passed = bound > -allowed - TIE
        rule = f"worse by at most {max(0.0, -bound):.3g} with {level:.0%} confidence, {allowed:g} is allowed"
    return Finding(name, ours, theirs, allowed, passed, f"{words}: {rule}")


# --- position-bias correction ---


@dataclass(frozen=True, slots=True)
class Judged:
    """Both policies' scores on the gate's turns, averaged over the orders in which the judge saw the answers."""

    # Both policies' mean scores, for each turn of which every answer was scored in every order.
    pairs: tuple[Pair, ...]
    # Scenario keys of the other turns.
    unscored: tuple[str, ...]
    # Share of the scored turns in which one order prefers the candidate and the other order the champion. A high share
    # means a judge with a strong position bias. `None` with one order, or where no turn was scored.
    order_disagreement: float | None


def merge_orders(comparisons: Sequence[BlindComparison], orders: Sequence[Mapping[str, float]]) -> Judged:
    """Average the judge's scores over the orders in which it saw the answers; count how often the orders disagree.

    `orders` maps trajectory id -> score for each order. A turn is unscored if an answer has no finite score in one.
    """
    pairs: list[Pair] = []
    unscored: list[str] = []
    flips = 0
    for turn, group, ours in comparisons:
        found = [_means(group, ours, values) for values in orders]
        means = [both for both in found if both is not None]
        if len(means) < len(orders) or not means:
            unscored.append(turn.scenario_key)
            continue
        pairs.append((turn.scenario_key, *_means_of(means)))
        differences = [a - b for a, b in means]
        flips += min(differences) < -TIE and max(differences) > TIE
    disagreement = flips / len(pairs) if pairs and len(orders) > 1 else None
    return Judged(tuple(pairs), tuple(unscored), disagreement)


def _means(group: Group, ours: frozenset[str], values: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the candidate's and the champion's mean score in one order; `None` unless every answer has a score."""
    by_us = [values.get(sibling.id, math.nan) for sibling in group.trajectories if sibling.id in ours]
    by_them = [values.get(sibling.id, math.nan) for sibling in group.trajectories if sibling.id not in ours]
    # Means of the answers that happen to have a score would compare other answers in the one order than in the other.
    if not by_us or not by_them or not all(map(math.isfinite, by_us + by_them)):
        return None
    return mean(by_us), mean(by_them)


# --- the verdict ---


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate wins the gate, with the reason as a sentence and the metrics behind it."""

    promote: bool
    reason: str
    metrics: JSON


def decide(scores: Iterable[Pair], config: GateConfig, *, seed: int = 0) -> Verdict:
    """Run the superiority test on both policies' scores of each turn; `seed` draws the subsets of the bound."""
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
    metrics: JSON = {"scenarios": count}
    metrics["candidate"], metrics["champion"] = _means_of(by_scenario)
    metrics |= {"difference": mean(differences), "lower_bound": bound}
    # Above and not equal: a candidate that answers like the champion has a bound of exactly 0 and must not win.
    wins = bound > config.margin + TIE
    tied = all(abs(difference) <= TIE for difference in differences)
    needed = None if wins or tied else scenarios_needed(differences, config.margin, config.level)
    if needed is not None:
        metrics["more_needed"] = needed - count
    return Verdict(wins, _reason(metrics, config, wins, tied), metrics)


def with_findings(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """Return the verdict; if a check failed, it becomes a rejection whose reason names every failed check."""
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
