"""The gate's settings and statistics: confidence bounds of the differences between two policies' scores. Pure.

- **Difference.** Turns of one scenario are not independent, so only their mean counts. For each scenario the tests use
  one difference: the candidate's mean minus the champion's, on the judge's scale from 0 to 1.
- **Unit.** A user may like what others dislike, so the scenarios of one user are not independent either. The unit of
  the tests is the user; a scenario whose user is not known is a unit of its own.
- **Error rate.** A candidate that is equal to the champion wins in at most `1 - level` (5 %) of the gate runs: type I
  error. This holds exactly for every number of units. Each further gate run of a candidate takes the same risk.
- **Non-inferiority tests** (`not_worse`) compare other metrics, each at the same level. The candidate must pass all of
  them, so the level needs no correction for their number (intersection-union test; Berger, Technometrics 24, 1982).
- **Position-bias correction** (`merge_orders`). The judge sees each group in one order and in the reverse order, and
  the mean of both scores counts (Wang et al. 2023, https://arxiv.org/abs/2305.17926).

The bound (`lower_bound`) inverts the sign-flip permutation test: the bound lies above a number exactly if that test
rejects the number as the mean difference. If candidate and champion are equal, swapping their names changes nothing, so
the differences are symmetric around zero whatever the scores look like. If they are equal only on average, the test
assumes that units are as often better by an amount as they are worse by it; `verdict` looks at the worst scenarios.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from statistics import NormalDist
from typing import Literal

from art_patch.errors import ConfigError
from art_patch.gate.turns import BlindComparison, Turn
from art_patch.types import Group

# (scenario key, candidate's metric, champion's metric) of one turn.
Pair = tuple[str, float, float]

# Means of the same numbers in another order differ by less than this, and no judge scores as finely. Without it,
# rounding would decide a tie.
TIE = 1e-9

NO_USERS: Mapping[str, str | None] = {}
"""Scenario key -> user: no user is known, so each scenario is a unit of its own."""

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

    # With fewer scored held-out scenarios the gate cannot decide. In small samples the bound is right as often as it
    # says, but few scenarios hardly ever show a task that the candidate ruins.
    min_scenarios: int = 30
    # The same for users, if users are known. The level needs some of both as well (`fewest`).
    min_users: int = 5
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
    # The candidate is rejected if it loses more in this share of the scenarios, the worst ones, than it gains in as
    # many, the best ones, and loses more than `max_worse` there. 0 switches this check off.
    worst_share: float = 0.05
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
        # Higher ones would need more random subsets than are drawn (`_DRAWS`).
        if not 0.5 <= self.level <= 0.999:
            raise ConfigError(f"the gate's level is {self.level:g}; give a confidence from 0.5 to 0.999")
        if not -1 <= self.margin < 1:
            raise ConfigError(
                f"the gate's margin is {self.margin:g}; scores lie in 0..1, so give one from -1 to below 1"
            )
        if self.orders not in (1, 2):
            raise ConfigError(f"the gate's orders are {self.orders}; there are 2, an order and its reverse, or give 1")
        for name in ("max_unscored", "max_worse", "worst_share", "max_user_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"the gate's {name} is {getattr(self, name):g}; give a share from 0 to 1")
        for name in ("min_scenarios", "min_users", "turns_per_scenario", "samples", "run_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the gate's {name} is {getattr(self, name)}; give 1 or more")
        if self.max_scenarios < self.min_scenarios:
            asked = f"max_scenarios is {self.max_scenarios}, and min_scenarios {self.min_scenarios}"
            raise ConfigError(f"the gate's {asked}; give at least as many, or no candidate can be tested")


# --- the confidence bound ---


def fewest(level: float) -> int:
    """Return the smallest number of units with which `lower_bound` is finite at this confidence level.

    The signs of n units can be flipped in 2 ** n ways, so the smallest p-value is 1 / 2 ** n; 95 % needs five.
    """
    return math.ceil(math.log2(1 / (1 - level)) - 1e-9)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; every order of the values gives the same bits."""
    return math.fsum(values) / len(values)


def lower_bound(
    differences: Sequence[float], level: float, *, units: Sequence[Hashable] | None = None, seed: int = 0
) -> float:
    """Return the one-sided lower confidence bound of the mean of paired differences; -infinity for too few (`fewest`).

    This is the typical-value bound (Hartigan, "Using subsample values as typical values", JASA 64, 1969): the sorted
    means of all subsets of the units cut the line into intervals, and each interval holds the true centre with the same
    probability.

    Args:
        differences: one for each scenario; finite. Their sums by unit are independent, and symmetric around the number
            of differences times the mean.
        level: confidence level of this one-sided bound, such as 0.95.
        units: the unit of each difference, such as its user; by default each difference is its own.
        seed: draws random subsets if there are more than ten units; up to ten, all subsets are used.
    """
    by_unit = _by_unit(differences, units)
    if len(by_unit) < fewest(level):
        return -math.inf
    means = sorted(_subset_means(by_unit, seed))
    # Rounded down: conservative where the level is between two steps. 1e-9 mends (1 - 0.9) * 2000 = 199.99...
    return means[int((1 - level) * len(means) + 1e-9)]


def _by_unit(differences: Sequence[float], units: Sequence[Hashable] | None) -> list[tuple[float, int]]:
    """Return the sum and the number of the differences of each unit."""
    found: dict[Hashable, list[float]] = defaultdict(list)
    for unit, difference in zip(range(len(differences)) if units is None else units, differences, strict=True):
        found[unit].append(difference)
    return [(math.fsum(its), len(its)) for its in found.values()]


def _subset_means(by_unit: Sequence[tuple[float, int]], seed: int) -> Iterator[float]:
    sums, counts = zip(*by_unit, strict=True)
    count = len(by_unit)
    if count <= _ALL_SUBSETS_UPTO:
        chosen: Iterator[int] = iter(range(2**count))
    else:
        # The empty subset, the observed arrangement, is always in the sample. Without it the test would be wrong more
        # often than the level says (Phipson and Smyth, "Permutation p-values should never be zero", 2010).
        rng = random.Random(seed)
        chosen = (rng.getrandbits(count) if draw else 0 for draw in range(_DRAWS + 1))
    for members in chosen:
        bits = list(map(int, f"{members:0{count}b}"))
        yield math.fsum(compress(sums, bits)) / sum(compress(counts, bits)) if members else -math.inf


def scenarios_needed(
    differences: Sequence[float], margin: float, level: float, *, units: Sequence[Hashable] | None = None
) -> int | None:
    """Return how many scenarios would probably prove that a mean difference like the observed one is above the margin.

    This is the sample size for a power of 80 % in normal approximation, ((z_level + z_power) * s / effect) ** 2, with
    as many scenarios of each unit as now. `None` if more would not help: the observed mean is not above the margin, or
    its spread is unknown.
    """
    over, sd = mean(differences) - margin, spread(differences, units)
    if over <= TIE or math.isnan(sd):
        return None
    z_level, z_power = map(NormalDist().inv_cdf, (level, 0.8))
    return max(len(differences) + 1, fewest(level), math.ceil(((z_level + z_power) * sd / over) ** 2))


def spread(differences: Sequence[float], units: Sequence[Hashable] | None = None) -> float:
    """Return the standard error of the mean times the square root of the number of differences; NaN for one unit.

    Without units this is the standard deviation; with units that differ it is larger.
    """
    by_unit = _by_unit(differences, units)
    centre, count = mean(differences), len(by_unit)
    if count < 2:
        return math.nan
    squares = math.fsum((total - size * centre) ** 2 for total, size in by_unit) / len(differences)
    return math.sqrt(squares * count / (count - 1))


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


def scenario_means(
    pairs: Iterable[Pair], user_of: Mapping[str, str | None]
) -> tuple[dict[str, tuple[float, float]], list[Hashable]]:
    """Return (mean of the candidate, mean of the champion) by scenario, over its turns; and each scenario's unit.

    The unit is the scenario's user, or the scenario itself if its user is not known.
    """
    turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, of_candidate, of_champion in pairs:
        turns[key].append((of_candidate, of_champion))
    # A tuple, because a user may be named like a scenario.
    units: list[Hashable] = [(None, key) if user_of.get(key) is None else user_of[key] for key in turns]
    return {key: means_of(both) for key, both in turns.items()}, units


def means_of(pairs: Collection[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of all first values and that of all second ones."""
    ours, theirs = zip(*pairs, strict=True)
    return mean(ours), mean(theirs)


def not_worse(
    name: str, pairs: Iterable[Pair], *, allowed: float, level: float, seed: int = 0, less_is_better: bool = False,
    user_of: Mapping[str, str | None] = NO_USERS,
) -> Finding:  # fmt: skip
    """Test non-inferiority: is the candidate worse than the champion by at most `allowed`, with confidence `level`?

    If the candidate is worse by more than that, the test wrongly passes it in at most `1 - level` of the cases. `pairs`
    has both policies' values of the metric for each turn; turns of one scenario are averaged first. `user_of` has the
    users of the scenarios.
    """
    by_scenario, units = scenario_means(pairs, user_of)
    if not by_scenario:
        return Finding(name, None, None, allowed, False, f"{name}: nothing to compare")
    ours, theirs = means_of(by_scenario.values())
    if not all(math.isfinite(metric) for both in by_scenario.values() for metric in both):
        return Finding(name, None, None, allowed, False, f"{name}: a metric is not finite")
    sign = -1.0 if less_is_better else 1.0
    better = [sign * (a - b) for a, b in by_scenario.values()]
    # A check may speak of few users' scenarios only. Then the scenarios are the units.
    bound = lower_bound(better, level, units=units if len(set(units)) >= fewest(level) else None, seed=seed)
    words = f"{name} {ours:.3g} against {theirs:.3g}"
    if math.isinf(bound):
        # No bound at this level exists for so few scenarios, so the observed mean decides, and no loss is allowed.
        passed = mean(better) >= -TIE
        rule = f"on {len(better)} scenarios, too few to allow anything worse"
    else:
        passed = bound > -allowed - TIE
        loss = max(0.0, -bound)
        rule = f"worse by at most {loss:.3g}, which errs at most {once_in(level)}; {allowed:g} is allowed"
    return Finding(name, ours, theirs, allowed, passed, f"{words}: {rule}")


def once_in(level: float) -> str:
    """Return the error rate of a confidence level in words, such as "once in twenty times" for 0.95."""
    times = round(1 / (1 - level), 1)
    return f"once in {'twenty' if times == 20 else f'{times:g}'} times"


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
        pairs.append((turn.scenario_key, *means_of(means)))
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
