"""The signals on which a policy under test is compared, the rules of its test, and the bets on a signal. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from art_patch.errors import ConfigError
from art_patch.promotion.bets import Bets
from art_patch.promotion.evidence import LATE_S, REST_S, SILENCE_S, Evidence, Observation

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
