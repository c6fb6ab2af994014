"""Evidence on a challenger and its champion -> go on, give it up, promote it, or stop without an answer. Pure.

Every signal of the table `SIGNALS` is put to the test of `sequential`, after each look again. A signal on which the
challenger is proven worse than its tolerance allows ends the test; what people and judges say of the answers alone can
end it the other way. Until `max_hours` nothing else happens; then the test ends without an answer, which is never a
promotion.

Errors. A challenger that is no worse than the tolerances on any signal is given up with a chance of at most `alpha`
over all looks and signals together, which share it equally; one that is no better than `margin` is promoted with a
chance of at most `alpha`. `hard_share` of the sessions, or of the newest `LATEST`, failing ends the test before there
is a proof, because every further call costs somebody an answer; it is not part of `alpha`. The newest count by
themselves, because a proof takes longer the more was good before.

A session counts once, by its newest call: calls of a session are alike, and one client that cannot be served fails as
often as it tries. Not by most of its calls, or a policy that breaks down would be stopped late in long sessions.

What cannot be read fails closed: a value that is not a number or off its scale is no evidence for its signal, is named,
and bars the promotion. Without anything of the champion's there is nothing to compare, so nothing is promoted either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Literal

from art_patch.errors import ConfigError
from art_patch.promotion.sequential import Block, difference, is_above, lower_bound, slower, upper_bound
from art_patch.types import JSON

LATEST = 10
"""So many of the challenger's sessions with the newest calls are looked at by themselves, beside the champion's of the
same time."""

Action = Literal["go on", "roll back", "promote", "inconclusive"]


@dataclass(frozen=True, slots=True)
class CanaryConfig:
    """When a challenger is given up, and when it has won.

    Attributes:
        alpha: chance of giving up one that is no worse, and of promoting one that is no better; see the module.
        min_sessions: nothing is promoted before each arm had this many sessions.
        max_hours: then the test ends, with an answer or without.
        margin: what a winner's rewards or feedback must be better by; below 0 it need not be better, only not much
            worse.
        reward_tolerance: how much lower rewards may be, on their scale from 0 to 1.
        feedback_tolerance: how much less content people may be, from 0 to 1.
        error_tolerance: how much larger the share of failed calls may be.
        fallback_tolerance: how much larger the share of calls may be that upstream had to answer.
        empty_tolerance: how much larger the share of answers may be that are empty or cut off.
        latency_ratio: how many times slower it may be, calls and first tokens.
        hard_sessions: sessions that must have failed before `hard_share` counts.
        hard_share: this much larger a share of sessions whose newest call failed or fell back ends the test at once;
            also of the newest `LATEST` sessions.
    """

    alpha: float = 0.05
    min_sessions: int = 20
    max_hours: float = 24.0
    margin: float = 0.0
    reward_tolerance: float = 0.05
    feedback_tolerance: float = 0.05
    error_tolerance: float = 0.02
    fallback_tolerance: float = 0.02
    empty_tolerance: float = 0.05
    latency_ratio: float = 1.5
    hard_sessions: int = 3
    hard_share: float = 0.6

    def __post_init__(self) -> None:
        """Refuse what would make the test mean something else.

        Raises:
            ConfigError: naming the setting.
        """
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
    """One thing on which both arms are compared.

    Attributes:
        name: in the evidence and in the metrics.
        words: for sentences: `its WORDS ...`.
        is_good: whether more of it is better.
        tolerance: the setting that says how much worse the challenger may be.
        promotes: whether being better on it is a reason to promote.
        is_time: compared by ratio and median, instead of by the difference of means.
    """

    name: str
    words: str
    is_good: bool
    tolerance: str
    promotes: bool = False
    is_time: bool = False


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
class Arm:
    """What was counted of one policy since the test began.

    Attributes:
        calls: that were meant for it.
        sessions: that they belong to.
        failed: of the calls, those that failed or that upstream had to answer.
        failed_sessions: of the sessions, those whose newest call did.
        failed_latest: the same of the sessions with the newest calls: the challenger's newest `LATEST`, and the
            champion's since the oldest of these, or its own newest `LATEST` if those are more.
        latest: how many these are; `LATEST`, or all, unless given.
    """

    calls: int = 0
    sessions: int = 0
    failed: int = 0
    failed_sessions: int = 0
    failed_latest: int = 0
    latest: int | None = None

    @property
    def of_latest(self) -> int:
        """How many sessions `failed_latest` counts."""
        return min(self.sessions, LATEST) if self.latest is None else self.latest


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was observed since the test began.

    Attributes:
        challenger: counts.
        champion: counts.
        blocks: what is compared, by the name of the signal, in the order in which it became known. Values are from 0
            to 1, times in milliseconds.
    """

    challenger: Arm = Arm()
    champion: Arm = Arm()
    blocks: Mapping[str, Sequence[Block]] = field(default_factory=dict[str, Sequence[Block]])


@dataclass(frozen=True, slots=True)
class WatchVerdict:
    """What is to be done, and why, in words and metrics."""

    action: Action
    reason: str
    metrics: JSON


def decide(
    evidence: Evidence, *, state: Literal["shadow", "canary"], hours: float, config: CanaryConfig
) -> WatchVerdict:
    """Decide what is to become of a challenger.

    Args:
        evidence: since it came into its state.
        state: only a canary can be promoted: of a shadow's answers nobody had any use.
        hours: for how long it has been in its state.
        config: when it is given up, and when it has won.
    """
    found = [_examine(signal, evidence.blocks.get(signal.name, ()), config) for signal in SIGNALS]
    counts = {name: _counts(getattr(evidence, name)) for name in ("challenger", "champion")}
    metrics: dict[str, Any] = counts | {"hours": round(hours, 3), "signals": {f.signal.name: f.metrics for f in found}}
    worse = [one for one in found if one.says == "worse"]
    better = [one for one in found if one.says == "better"]
    bars = [one for one in found if one.says == "unreadable"]
    if (broken := _is_broken(evidence, config)) is not None:
        return WatchVerdict("roll back", broken, metrics)
    if worse:
        return WatchVerdict("roll back", "; ".join(one.sentence for one in worse), metrics)
    missing = _missing(evidence, state, bars, config)
    if better and not missing:
        return WatchVerdict("promote", "; ".join(one.sentence for one in better), metrics)
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
    if not blocks:
        return _Finding(signal, "no data", f"no {signal.words} of both yet", {"says": "no data", "compared": 0})
    wrong = next((v for b in blocks for v in (*b.challenger, *b.champion) if not _is_on_scale(v, signal)), None)
    if wrong is not None:
        scale = "a time" if signal.is_time else "from 0 to 1"
        sentence = f"a value of {signal.words} is {wrong}, not {scale}, so it cannot be compared"
        return _Finding(
            signal, "unreadable", sentence, {"says": "unreadable", "compared": len(blocks), "value": str(wrong)}
        )
    tolerance: float = getattr(config, signal.tolerance)
    gains, null = _gains(signal, blocks, tolerance)
    losing = config.alpha / len(SIGNALS)
    winning = config.alpha / sum(one.promotes for one in SIGNALS)
    typical: Callable[[Sequence[float]], float] = median if signal.is_time else _mean
    ours, theirs = (typical([v for b in blocks for v in side(b)]) for side in (_challenger, _champion))
    says = "open"
    if is_above([-gain for gain in gains], null, losing):
        says = "worse"
    elif signal.promotes and is_above(gains, config.margin, winning):
        says = "better"
    metrics: dict[str, Any] = {"says": says, "compared": len(blocks), "challenger": ours, "champion": theirs}
    metrics |= {"tolerance": tolerance}
    if not signal.is_time:
        sign = 1 if signal.is_good else -1
        bounds = sorted((sign * lower_bound(gains, winning), sign * upper_bound(gains, losing)))
        metrics |= {"difference": sign * _mean(gains), "above": bounds[0], "below": bounds[1]}
    return _Finding(signal, says, _sentence(signal, says, ours, theirs, len(blocks), config), metrics)


def _is_on_scale(value: float, signal: Signal) -> bool:
    return math.isfinite(value) and value >= 0 and (signal.is_time or value <= 1)


def _gains(signal: Signal, blocks: Sequence[Block], tolerance: float) -> tuple[list[float], float]:
    """How much better the challenger is in each block, and what its mean loss may come to."""
    if signal.is_time:
        slow = partial(slower, ratio=tolerance)
        return [-slow(block) for block in blocks], 0.0
    sign = 1 if signal.is_good else -1
    return [sign * difference(block) for block in blocks], tolerance


def _sentence(signal: Signal, says: str, ours: float, theirs: float, compared: int, config: CanaryConfig) -> str:
    show = "{:.0f} ms against {:.0f} ms" if signal.is_time else "{:.3f} against {:.3f}"
    metrics = f"{show.format(ours, theirs)} in {compared} comparisons"
    if says == "worse":
        tolerance = getattr(config, signal.tolerance)
        by = f"more than {tolerance:g} times the champion's" if signal.is_time else f"worse by more than {tolerance:g}"
        return f"its {signal.words} is {by}: {metrics}"
    if says == "better":
        by = f"better by more than {config.margin:g}" if config.margin >= 0 else f"not worse by {-config.margin:g}"
        return f"its {signal.words} is {by}: {metrics}"
    return f"its {signal.words}: {metrics}"


def _is_broken(evidence: Evidence, config: CanaryConfig) -> str | None:
    ours, theirs = evidence.challenger, evidence.champion
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


def _missing(
    evidence: Evidence, state: Literal["shadow", "canary"], bars: Sequence[_Finding], config: CanaryConfig
) -> str | None:
    if bars:
        return "; ".join(one.sentence for one in bars)
    if not evidence.champion.calls:
        return "the champion answered nothing meanwhile, so there is nothing to compare with"
    if state == "shadow":
        return "a shadow is not promoted; let it answer a share of the sessions first"
    ours, theirs = evidence.challenger.sessions, evidence.champion.sessions
    if min(ours, theirs) < config.min_sessions:
        return f"{ours} sessions of its own, {theirs} of the champion's; {config.min_sessions} of each are needed"
    return None


def _counts(arm: Arm) -> dict[str, int]:
    return {"calls": arm.calls, "sessions": arm.sessions, "failed": arm.failed}


def _share(some: int, of_all: int) -> float:
    return some / of_all if of_all else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _challenger(block: Block) -> tuple[float, ...]:
    return block.challenger


def _champion(block: Block) -> tuple[float, ...]:
    return block.champion
