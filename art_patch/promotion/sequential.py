"""The canary test: a sequential test of a policy against the champion, valid however often it is looked at. Pure.

Paired comparisons from live traffic (`Evidence`) decide: go on, roll back, promote, or end without an answer.

**Hypotheses.** For each signal in `SIGNALS`, the null hypothesis is that the policy under test is worse than the
champion by at most the signal's tolerance. If the test rejects it, the policy is rolled back. For rewards and feedback,
a second null hypothesis is that the policy is better by at most `margin`. If the test rejects this one, a canary is
promoted as soon as both policies have answered `min_sessions` sessions.

**Error rates**. A wrong rollback has a probability of at most `alpha` for all looks of one test together, which the
signals share equally (Bonferroni); a wrong promotion likewise. The breakdown rule (`hard_share`) is not covered: it
waits for no proof, because every further call would cost a user an answer.

**Unit.** The unit is a block (`evidence.blocks`), which has values of both policies from the same time. It gives one
difference D of their means, from -1 to 1; nothing else is assumed about the values. The policy's share of the sessions
may change: the next share is chosen before the next block begins, so the expectation of each D stays the difference
between the policies. A test goes on after a change and keeps its capital: a restart would give a worse policy another
chance of `alpha`.

**Betting martingale.** Consider the null hypothesis that the mean of D is at most m. A bettor starts with capital 1 and
bets a fraction g before each block; the block multiplies the capital by `1 + g (D - m) / (1 + m)`, which is never
negative. If the null hypothesis is true, the expected capital does not grow. So by Ville's inequality the capital ever
reaches `1 / alpha` with a probability of at most `alpha`. The mean of the capitals of several g has the same property:
a large g finds a large difference within few blocks, a small g a small difference later. The numbers m that are not
rejected form a confidence sequence. See Waudby-Smith and Ramdas 2024, https://arxiv.org/abs/2010.09686, and Howard et
al. 2021, https://arxiv.org/abs/1810.08240. Bets that adapt to the observed variance are left out.

**Fails closed.** A signal with a value that is not a number, or outside its scale, cannot be compared, and a champion
without calls neither. Then the policy is not promoted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from art_patch.errors import ConfigError
from art_patch.promotion.evidence import Block, Evidence
from art_patch.types import JSON

Action = Literal["go on", "roll back", "promote", "inconclusive"]

# Betting fractions g; the capital is split among them equally.
BETS = (0.05, 0.15, 0.35, 0.6, 0.9)

_HALVINGS = 9  # a bound is exact to 2 / 2 ** 9 = 0.004


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """When the policy under test (canary or shadow) is rolled back, and when it is promoted."""

    # Probability of rolling back a challenger that is not worse, and of promoting one that is not better.
    alpha: float = 0.05
    # Sessions of each arm before a promotion.
    min_sessions: int = 20
    max_hours: float = 24.0
    # How much better a winner's rewards or feedback must be, on a scale 0..1. Below 0, it may be that much worse.
    margin: float = 0.0
    # How much worse the challenger may be: mean reward and feedback (0..1), ...
    reward_tolerance: float = 0.05
    feedback_tolerance: float = 0.05
    # ... share of calls that failed, that upstream had to answer, and whose answer was empty or cut off, ...
    error_tolerance: float = 0.02
    fallback_tolerance: float = 0.02
    empty_tolerance: float = 0.05
    # ... and how many times as long its calls and its first tokens may take.
    latency_ratio: float = 1.5
    # Breakdown rule: so many sessions must have failed, and the share of failed sessions must exceed the champion's by
    # this much, among all sessions or among the newest `LATEST`.
    hard_sessions: int = 3
    hard_share: float = 0.6

    def __post_init__(self) -> None:
        """Refuse settings that would make the test mean something else: `ConfigError` names the range."""
        tolerances = {s.tolerance: getattr(self, s.tolerance) for s in SIGNALS if s.tolerance != "latency_ratio"}
        for name, value in tolerances.items():
            _check(name, value, 0 <= value < 1, "at least 0 and below 1")
        _check("alpha", self.alpha, 0 < self.alpha < 0.5, "above 0 and below 0.5")
        _check("margin", self.margin, -1 < self.margin < 1, "between -1 and 1")
        _check("latency_ratio", self.latency_ratio, self.latency_ratio >= 1, "at least 1")
        _check("max_hours", self.max_hours, self.max_hours > 0, "above 0")
        _check("min_sessions", self.min_sessions, self.min_sessions >= 1, "at least 1")
        _check("hard_sessions", self.hard_sessions, self.hard_sessions >= 2, "at least 2")
        _check("hard_share", self.hard_share, 0 < self.hard_share <= 1, "above 0 and at most 1")


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
    promotes: bool = False  # whether being better on it is a reason to promote
    is_time: bool = False  # compared by the ratio of medians, because means of times follow single slow calls


SIGNALS = (
    Signal("reward", "reward", True, "reward_tolerance", promotes=True),
    Signal("feedback", "people's feedback", True, "feedback_tolerance", promotes=True),
    Signal("errors", "share of failed calls", False, "error_tolerance"),
    Signal("fallbacks", "share of calls that upstream had to answer", False, "fallback_tolerance"),
    Signal("empty", "share of answers that are empty or cut off", False, "empty_tolerance"),
    Signal("latency_ms", "time for a call", False, "latency_ratio", is_time=True),
    Signal("ttft_ms", "time to the first token", False, "latency_ratio", is_time=True),
)


@dataclass(frozen=True, slots=True)
class WatchVerdict:
    """The decision on the policy under test, with its reason as a sentence and the metrics behind it."""

    action: Action
    reason: str
    metrics: JSON


def decide(
    evidence: Evidence, *, state: Literal["shadow", "canary"], hours: float, config: CanaryConfig
) -> WatchVerdict:
    """Decide whether the test goes on, or the policy under test is rolled back or promoted, from all evidence so far.

    A `shadow` is never promoted, because no user has got its answers. `hours` is how long the test has been running.
    """
    found = [_examine(signal, evidence.blocks.get(signal.name, ()), config) for signal in SIGNALS]
    arms = {"challenger": evidence.challenger, "champion": evidence.champion}
    metrics: dict[str, Any] = {
        name: {"calls": arm.calls, "sessions": arm.sessions, "failed": arm.failed} for name, arm in arms.items()
    }
    metrics |= {"hours": round(hours, 3), "signals": {one.signal.name: one.metrics for one in found}}
    worse, better, bars = (
        "; ".join(one.sentence for one in found if one.says == says) for says in ("worse", "better", "unreadable")
    )
    # In this order: a rollback needs no other condition, a promotion needs all of them.
    if against := _broken(evidence, config) or worse:
        return WatchVerdict("roll back", against, metrics)
    missing = bars or _missing(evidence, state, config)
    if better and not missing:
        return WatchVerdict("promote", better, metrics)
    so_far = missing or "neither worse nor better is proven yet"
    if not hours < config.max_hours:  # a clock that gives no number ends the test, too
        return WatchVerdict("inconclusive", f"no answer within {config.max_hours:g} hours: {so_far}", metrics)
    return WatchVerdict("go on", so_far, metrics)


@dataclass(frozen=True, slots=True)
class _Finding:
    signal: Signal
    says: Literal["worse", "better", "open", "unreadable", "no data"]
    sentence: str
    metrics: JSON


def _examine(signal: Signal, blocks: Sequence[Block], config: CanaryConfig) -> _Finding:
    """Test one signal in both directions."""
    if not blocks:
        return _Finding(signal, "no data", f"no {signal.words} of both yet", {"says": "no data", "compared": 0})
    our_values, their_values = [v for b in blocks for v in b.challenger], [v for b in blocks for v in b.champion]
    wrong = next((v for v in our_values + their_values if not _is_on_scale(v, signal)), None)
    if wrong is not None:
        scale = "a time" if signal.is_time else "from 0 to 1"
        sentence = f"a value of {signal.words} is {wrong}, not {scale}, so it cannot be compared"
        metrics = {"says": "unreadable", "compared": len(blocks), "value": str(wrong)}
        return _Finding(signal, "unreadable", sentence, metrics)
    tolerance: float = getattr(config, signal.tolerance)
    gains, null = _gains(signal, blocks, tolerance)
    # Bonferroni: one share for each test that can end in a rollback, and for each that can end in a promotion.
    losing = config.alpha / len(SIGNALS)
    winning = config.alpha / sum(one.promotes for one in SIGNALS)
    typical: Callable[[Sequence[float]], float] = median if signal.is_time else _mean
    ours, theirs = typical(our_values), typical(their_values)
    says = "open"
    # A loss is a gain with its sign turned: is the mean loss proven to exceed the tolerance?
    if is_above([-gain for gain in gains], null, losing):
        says = "worse"
    elif signal.promotes and is_above(gains, config.margin, winning):
        says = "better"
    metrics = {"says": says, "compared": len(blocks), "challenger": ours, "champion": theirs, "tolerance": tolerance}
    if not signal.is_time:
        sign = 1 if signal.is_good else -1
        bounds = sorted((sign * lower_bound(gains, winning), sign * upper_bound(gains, losing)))
        metrics |= {"difference": sign * _mean(gains), "above": bounds[0], "below": bounds[1]}
    return _Finding(signal, says, _sentence(signal, says, ours, theirs, len(blocks), config), metrics)


def _is_on_scale(value: float, signal: Signal) -> bool:
    return math.isfinite(value) and value >= 0 and (signal.is_time or value <= 1)


def _gains(signal: Signal, blocks: Sequence[Block], tolerance: float) -> tuple[list[float], float]:
    """Return the challenger's gain in each block (better is positive), and the mean loss that the signal tolerates."""
    if signal.is_time:
        # The tolerance is inside of the sign that `slower` returns, so the tolerated mean loss is 0.
        return [-slower(block, tolerance) for block in blocks], 0.0
    sign = 1 if signal.is_good else -1
    return [sign * difference(block) for block in blocks], tolerance


def _sentence(signal: Signal, says: str, ours: float, theirs: float, compared: int, config: CanaryConfig) -> str:
    show, by = "{:.0f} ms against {:.0f} ms" if signal.is_time else "{:.3f} against {:.3f}", ""
    if says == "worse":
        tolerance = getattr(config, signal.tolerance)
        by = f"more than {tolerance:g} times the champion's" if signal.is_time else f"worse by more than {tolerance:g}"
    elif says == "better":
        by = f"better by more than {config.margin:g}" if config.margin >= 0 else f"not worse by {-config.margin:g}"
    return f"its {signal.words}{by and f' is {by}'}: {show.format(ours, theirs)} in {compared} comparisons"


def _broken(evidence: Evidence, config: CanaryConfig) -> str | None:
    """Apply the breakdown rule: return why the challenger is broken, or `None`."""
    ours, theirs = evidence.challenger, evidence.champion
    # The newest sessions by themselves, too: among all, a breakdown after a long good time shows late.
    every = (ours.failed_sessions, ours.sessions, theirs.failed_sessions, theirs.sessions, "")
    latest = (ours.failed_latest, ours.of_latest, theirs.failed_latest, theirs.of_latest, "newest ")
    for failed, sessions, their_failed, their_sessions, which in (every, latest):
        worse = _share(failed, sessions) - _share(their_failed, their_sessions) >= config.hard_share
        if worse and failed >= config.hard_sessions:
            return (
                f"in {failed} of its {sessions} {which}sessions the newest call failed or was left to upstream, "
                f"in {their_failed} of {their_sessions} of the champion's"
            )
    return None


def _missing(evidence: Evidence, state: Literal["shadow", "canary"], config: CanaryConfig) -> str | None:
    """Return what bars a promotion; `None` if nothing does."""
    if not evidence.champion.calls:
        return "the champion answered nothing meanwhile, so there is nothing to compare with"
    if state == "shadow":
        return "a shadow is not promoted; let it answer a share of the sessions first"
    ours, theirs = evidence.challenger.sessions, evidence.champion.sessions
    if min(ours, theirs) < config.min_sessions:
        return f"{ours} sessions of its own, {theirs} of the champion's; {config.min_sessions} of each are needed"
    return None


def _share(some: int, of_all: int) -> float:
    return some / of_all if of_all else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# --- the test: bets on the mean of the differences ---


def difference(block: Block) -> float:
    """Return the mean of the policy under test minus the champion's mean in a block."""
    return sum(block.challenger) / len(block.challenger) - sum(block.champion) / len(block.champion)


def slower(block: Block, ratio: float) -> float:
    """Return 1 if the tested policy's median time is above `ratio` times the champion's, -1 if below, 0 if equal.

    The sign is returned and not the difference, because it lies in -1..1 whatever the scale of the times and however
    long their tail. If both policies are equally fast and `ratio` is above 1, -1 is more frequent than 1, so the mean
    over blocks is below 0.
    """
    ours, theirs = median(block.challenger), ratio * median(block.champion)
    return float((ours > theirs) - (ours < theirs))


def is_above(differences: Sequence[float], null: float, alpha: float) -> bool:
    """Whether the betting martingale has rejected "the mean difference is at most `null`" after any block so far.

    `differences` lie in -1..1 and are in order of time; `null` is above -1. `alpha` is the largest probability of a
    wrong rejection, over all looks together.
    """
    enough = len(BETS) / alpha
    capitals = [1.0] * len(BETS)
    parts = [part / (1 + null) for part in BETS]
    for value in differences:
        gain = value - null
        capitals = [capital * (1 + part * gain) for capital, part in zip(capitals, parts, strict=True)]
        if sum(capitals) >= enough:
            # A rejection stands: Ville's inequality bounds the maximum of the capital, not its last value.
            return True
    return False


def lower_bound(differences: Sequence[float], alpha: float) -> float:
    """Return the lower limit of the mean difference's confidence sequence of level 1 - `alpha`; -1 without data."""
    # The capital falls as the null grows, so the largest rejected null is found by bisection.
    low, step = -1.0, 2.0
    for _ in range(_HALVINGS):
        step /= 2
        if is_above(differences, low + step, alpha):
            low += step
    return low


def upper_bound(differences: Sequence[float], alpha: float) -> float:
    """Return the upper limit of the same; 1 without data."""
    return -lower_bound([-value for value in differences], alpha)
