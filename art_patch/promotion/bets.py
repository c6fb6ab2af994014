"""The signals on which two policies are compared, and bets on their difference, from sessions in order of time. Pure.

A session goes to the canary with a probability p that is known before it begins. It has one value Y from 0 to
1, and m is a guess of it that was made before. With Z = (Y - m) / p for a session of the canary and -(Y - m) / (1 - p)
for one of the champion, the expectation of Z is the difference between the policies in this session, whatever m is,
however traffic drifts and whoever the users are: only the assignment is random. A bettor starts with wealth 1 and bets
a fraction f of it on each Z, so that the wealth is never negative: on "better" `1 + f (Z - margin) / (lo + margin)`, on
"worse" `1 - f (Z + tolerance) / (hi + tolerance)`, where Z lies between -lo and hi. Under the null hypothesis the
expected wealth does not grow, so by Ville's inequality it ever reaches 1 / alpha with a probability of at most alpha,
however often somebody looks. The wealth is split among `FRACTIONS` equally: a large fraction finds a large difference
within few sessions, a small one finds a small difference later. So a policy that fails at once needs no other rule.

A test that goes on for good looks for a change that may come at any time. A bettor that starts with all its wealth
loses most of it before the change. So the wealth of such a test is spread (`Bets.spread`): it waits, and is staked
little by little. This is a mixture of tests that begin at all these times, and the limit holds for it too. See Shin,
Ramdas and Rinaldo 2022 on e-detectors, https://arxiv.org/abs/2203.03532.
See Waudby-Smith and Ramdas 2024, https://arxiv.org/abs/2010.09686, Howard et al. 2021,
https://arxiv.org/abs/1810.08240, and for experiments Ham et al. 2022, https://arxiv.org/abs/2210.08639.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from statistics import fmean
from typing import NamedTuple

from art_patch.errors import ConfigError
from art_patch.promotion.evidence import LATE_S, REST_S, SILENCE_S, Evidence, Observation

# The fractions of the wealth that are bet: twelve, from a small difference's to the largest, in equal steps of the log.
FRACTIONS = tuple(0.004 * (0.95 / 0.004) ** (step / 11) for step in range(12))

# Of a test that goes on for good: six, since each costs a share of the wealth that is little already.
COARSE_FRACTIONS = tuple(0.02 * (0.9 / 0.02) ** (step / 5) for step in range(6))

_GUESS_WEIGHT = 10.0  # the first guess counts as so many sessions

# Share of the wealth that is staked at the begin, where the rest is spread.
_FIRST_STAKE = 0.1
# Weight of a value in the guesses, each time that another one comes: traffic of a test for good drifts.
_FADES = 0.998


class Bets:
    """Two bettors on one signal: one on "better", one on "worse". Values are from 0 to 1, and 1 is good."""

    def __init__(self, first_guess: float, *, margin: float = 0.0, tolerance: float = 0.0) -> None:
        self._margin, self._tolerance = margin, tolerance
        self._sum, self._weight = first_guess * _GUESS_WEIGHT, _GUESS_WEIGHT
        self._joins: list[tuple[float, float]] = []  # a heap of values that do not count in the guesses yet
        self._fractions, self._fades = FRACTIONS, 1.0
        self._better = self._worse = [1 / len(FRACTIONS)] * len(FRACTIONS)
        # Wealth that is not staked yet, how much is staked each second, and when some was staked last.
        self._waits, self._stakes_a_s, self._staked_at = 0.0, 0.0, 0.0
        # The largest wealth so far decides: a proof stands, whatever comes after it.
        self.most_better = self.most_worse = 1.0
        self._z: list[float] = []

    def spread(self, spread_s: float, *, begin: float, is_whole: bool) -> None:
        """Stake the wealth evenly over `spread_s` from `begin` on; a tenth at once if the test `is_whole`, began then.

        To be called before the first session is added. A test of which only the last part is known (not `is_whole`)
        bets on that part as the whole test does, so it alarms at most as often.
        """
        at_once = _FIRST_STAKE if is_whole else 0.0
        self._fractions, self._fades = COARSE_FRACTIONS, _FADES
        self._better = self._worse = [at_once / len(COARSE_FRACTIONS)] * len(COARSE_FRACTIONS)
        self._waits, self._stakes_a_s, self._staked_at = 1 - at_once, (1 - _FIRST_STAKE) / spread_s, begin

    @property
    def sessions(self) -> int:
        """The number of sessions that were bet on."""
        return len(self._z)

    @property
    def worse(self) -> float:
        """The present wealth of the bets on "worse", with what waits."""
        return sum(self._worse) + self._waits

    @property
    def difference(self) -> float:
        """The mean value of the policy under test minus the champion's: unbiased, whatever their shares were."""
        return fmean(self._z) if self._z else 0.0

    @property
    def error(self) -> float:
        """The standard error of `difference`, for forecasts; no decision rests on it."""
        mean, n = self.difference, len(self._z)
        return math.sqrt(sum((z - mean) ** 2 for z in self._z) / (n * (n - 1))) if n > 1 else math.inf

    def sessions_needed(self, alpha: float, difference: float) -> float:
        """How many sessions such a difference takes to be proven, of which the present number is a part."""
        n = len(self._z)
        variance = self.error**2 * n if n > 1 else math.inf
        # The best fraction's wealth grows by about difference**2 / (2 * variance) a session, in logs.
        return 2 * variance * math.log(len(FRACTIONS) / alpha) / difference**2 if difference else math.inf

    def add(self, seen: Observation, value: float, champions: float | None = None) -> None:
        """Bet on one session. `champions` is the champion's value of the same session, if both policies answered it."""
        if champions is not None:
            z, lo, hi = value - champions, 1.0, 1.0
        else:
            while self._joins and self._joins[0][0] <= seen.at:
                self._sum, self._weight = self._sum + heappop(self._joins)[1], self._weight + 1
            guess, p = self._sum / self._weight if seen.guess is None else seen.guess, seen.share
            self._sum, self._weight = self._sum * self._fades, self._weight * self._fades
            heappush(self._joins, (seen.at if seen.joins is None else seen.joins, value))
            if not 0 < p < 1:
                return  # it could not have been the other policy's, so it compares nothing
            z = (value - guess) / p if seen.challenger else (guess - value) / (1 - p)
            lo, hi = max(guess / p, (1 - guess) / (1 - p)), max((1 - guess) / p, guess / (1 - p))
        self._z.append(z)
        up = (z - self._margin) / (lo + self._margin) if lo + self._margin > 0 else 0.0
        down = (z + self._tolerance) / (hi + self._tolerance)
        if self._waits:
            more = self._stake(seen.at) / len(self._fractions)
            self._better, self._worse = ([wealth + more for wealth in its] for its in (self._better, self._worse))
        self._better = [wealth * (1 + f * up) for wealth, f in zip(self._better, self._fractions, strict=True)]
        self._worse = [wealth * (1 - f * down) for wealth, f in zip(self._worse, self._fractions, strict=True)]
        better, worse = sum(self._better) + self._waits, sum(self._worse) + self._waits
        # A comparison costs less than `max`, and there are millions.
        if better > self.most_better:
            self.most_better = better
        if worse > self.most_worse:
            self.most_worse = worse

    def _stake(self, at: float) -> float:
        """Return the wealth to stake with a session that was known then: it depends on the time alone."""
        stake = min(max(at - self._staked_at, 0.0) * self._stakes_a_s, self._waits)
        self._waits, self._staked_at = self._waits - stake, max(at, self._staked_at)
        return stake


# --- signals ---

# A canary that has answered so many sessions may answer so many percent of them.
RAMP = ((12, 20.0), (60, 50.0))


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """When the policy under test (canary or shadow) is rolled back, and when it is promoted."""

    # Probability of rolling back a challenger that is not worse, and of promoting one that is not better.
    alpha: float = 0.05
    # Sessions of each arm before a promotion.
    min_sessions: int = 20
    max_hours: float = 168.0
    # A session that has made no call for so many seconds has ended, and its value is taken.
    rest_s: float = REST_S
    # A session without a reward or feedback so many seconds after its end is silent.
    silence_s: float = SILENCE_S
    # How much better a winner's rewards or feedback must be, on a scale 0..1. Below 0, it may be that much worse.
    margin: float = 0.0
    # Against upstream a winner may be worse by so much.
    max_loss: float = 0.05
    # How much worse the challenger may be: mean reward and feedback (0..1), ...
    reward_tolerance: float = 0.0
    feedback_tolerance: float = 0.0
    # ... share of sessions with a call that failed or that upstream had to answer, share of empty or cut answers, ...
    failure_tolerance: float = 0.0
    empty_tolerance: float = 0.05
    # ... and how many times as long its calls and its first tokens may take.
    latency_ratio: float = 1.5
    # Percent of the sessions that a canary answers once it has answered so many and nothing speaks against it.
    ramp: tuple[tuple[int, float], ...] = RAMP

    def __post_init__(self) -> None:
        """Refuse settings that would make the test mean something else: `ConfigError` names the range."""
        tolerances = {s.tolerance: getattr(self, s.tolerance) for s in SIGNALS if s.tolerance != "latency_ratio"}
        for name, value in tolerances.items():
            _check(name, value, 0 <= value < 1, "at least 0 and below 1")
        _check("alpha", self.alpha, 0 < self.alpha < 0.5, "above 0 and below 0.5")
        _check("margin", self.margin, -1 < self.margin < 1, "between -1 and 1")
        _check("max_loss", self.max_loss, 0 <= self.max_loss < 1, "at least 0 and below 1")
        _check("latency_ratio", self.latency_ratio, self.latency_ratio >= 1, "at least 1")
        _check("max_hours", self.max_hours, self.max_hours > 0, "above 0")
        _check("rest_s", self.rest_s, self.rest_s > 0, "above 0")
        _check("silence_s", self.silence_s, 0 < self.silence_s <= LATE_S, f"above 0, and at most {LATE_S:g}")
        _check("min_sessions", self.min_sessions, self.min_sessions >= 1, "at least 1")

    @property
    def against_upstream(self) -> "CanaryConfig":
        """The configuration of a test against upstream, where a winner may be worse by `max_loss`."""
        return replace(self, margin=-self.max_loss)

    @property
    def winning_alpha(self) -> float:
        """The part of `alpha` that each signal has which promotes."""
        return self.alpha / sum(one.promotes for one in SIGNALS)

    def losing_alpha(self, signal: "Signal") -> float:
        """The part of `alpha` that a signal has for a rollback."""
        return self.alpha * signal.alpha_share


def _check(name: str, value: float, right: bool, said: str) -> None:
    if not (math.isfinite(value) and right):
        raise ConfigError(f"{name} is {value}; it must be {said}")


@dataclass(frozen=True, slots=True)
class Signal:
    """A quantity, such as reward or latency, on which the policy under test is compared with the champion."""

    name: str
    words: str  # for sentences: "its WORDS is worse by ..."
    is_good: bool  # whether more of it is better
    tolerance: str  # the field of `CanaryConfig` that limits a loss
    alpha_share: float  # its share of `alpha`, for a rollback; those of all signals add up to 1
    first_guess: float  # of a session's value, before any is known
    promotes: bool = False  # whether being better on it is a reason to promote
    is_time: bool = False  # in milliseconds, of any size
    control_share: float = 0.05  # its share of the control group's alpha, which is there for quality above all


SIGNALS = (
    Signal("reward", "reward", True, "reward_tolerance", 0.4, 0.5, promotes=True, control_share=0.4),
    Signal("feedback", "people's feedback", True, "feedback_tolerance", 0.12, 0.5, promotes=True, control_share=0.4),
    Signal("failed", "share of sessions with a failed call", False, "failure_tolerance", 0.12, 0.02),
    Signal("empty", "share of answers that are empty or cut off", False, "empty_tolerance", 0.12, 0.05),
    Signal("latency_ms", "time for a call", False, "latency_ratio", 0.12, 0.5, is_time=True),
    Signal("ttft_ms", "time to the first token", False, "latency_ratio", 0.12, 0.5, is_time=True),
)


def begin_bets(signal: Signal, tolerance: float, margin: float) -> Bets:
    """Return the bets on a signal before the first session."""
    if signal.is_time:  # its tolerance is inside of the values
        return Bets(signal.first_guess)
    return Bets(signal.first_guess if signal.is_good else 1 - signal.first_guess, margin=margin, tolerance=tolerance)


def add_bets(
    bets: Bets, signal: Signal, seen: Sequence[Observation], tolerance: float,
    after: Callable[[Observation], None] | None = None,
) -> None:  # fmt: skip
    """Bet on the sessions in the order in which their values became known; `after` is called after each of them."""
    if not signal.is_time:
        for one in seen if signal.is_good else map(Observation.turned, seen):
            bets.add(one, one.value, one.champions)
            if after is not None:
                after(one)
        return
    logs = 0.0
    for place, one in enumerate(seen):
        # The tolerated ratio is inside of the value; so is a scale that follows the times before it, of both policies.
        scale = one.champions if one.champions is not None else math.exp(logs / place) if place else one.value
        ours = one.value / tolerance if one.challenger else one.value
        bets.add(one, scale / (scale + ours) if scale + ours else 0.5, None if one.champions is None else 0.5)
        logs += math.log(max(one.value, 0.001))
        if after is not None:
            after(one)


def is_on_scale(value: float, signal: Signal) -> bool:
    """Whether a value is from 0 to 1, or a time."""
    return math.isfinite(value) and value >= 0 and (signal.is_time or value <= 1)


class Proof(NamedTuple):
    """How much was proven on one signal at a time."""

    at: float  # seconds since the epoch
    sessions: int
    # Shares of what a proof takes, on a scale of logs: 0 at the begin, 1 at the boundary.
    worse: float
    better: float | None  # `None` for a signal by which no policy is promoted


def proofs_over_time(evidence: Evidence, config: CanaryConfig, *, points: int = 100) -> dict[str, list[Proof]]:
    """Return for each signal with observations how the proofs of both directions grew, in at most `points` steps.

    The proofs are those that `decide` compares with its boundaries, of the sessions that have a value. They never fall:
    a proof stands, whatever comes after it.
    """
    return {
        signal.name: _path(signal, seen, config, points)
        for signal in SIGNALS
        if (seen := evidence.observations.get(signal.name)) and all(is_on_scale(one.value, signal) for one in seen)
    }


def _path(signal: Signal, seen: Sequence[Observation], config: CanaryConfig, points: int) -> list[Proof]:
    tolerance: float = getattr(config, signal.tolerance)
    bets, path, numbers = begin_bets(signal, tolerance, config.margin), list[Proof](), count(1)
    losing, winning = -math.log(config.losing_alpha(signal)), -math.log(config.winning_alpha)
    every = math.ceil(len(seen) / points)

    def note(one: Observation) -> None:
        number = next(numbers)
        if number % every == 0 or number == len(seen):
            worse, better = math.log(bets.most_worse) / losing, math.log(bets.most_better) / winning
            path.append(Proof(one.at, number, worse, better if signal.promotes else None))

    add_bets(bets, signal, seen, tolerance, note)
    return path
