"""The canary test: bets on the difference between two policies, valid however often one looks. Pure.

The sessions of both policies (`Evidence`) decide: go on, roll back, promote, or end without an answer.

**Hypotheses.** For each signal in `SIGNALS`, one null hypothesis is that the policy under test is worse than the
champion by at most the signal's tolerance; if it is rejected, the policy is rolled back. For rewards and feedback,
another one is that the policy is better by at most `margin`; if it is rejected, a canary is promoted as soon as both
policies have answered `min_sessions` sessions. A shadow is never promoted. Both hypotheses are about each session by
itself: where a policy is better for some users and worse for others, "no better" may be rejected although the mean over
all is equal.

**Bets.** `bets` gives each signal a wealth for "worse" and one for "better". Under the null hypothesis it ever reaches
1 / alpha with a probability of at most alpha, however often somebody looks.

**Error rates.** A wrong rollback has a probability of at most `alpha` for all looks and signals of one test together,
shared as `Signal.alpha_share` says; a wrong promotion likewise. Nothing else ends a test before its time, except that
it cannot be decided any more.

**The control group** tests the champion, as the policy under test, against upstream, for as long as it serves. Its
wealth is staked little by little, so a wrong rollback has a probability of at most `alpha` in the first `CONTROL_DAYS`,
and this often on average in later ones. Nothing else ends this test.

**Unequal coverage.** If one policy's sessions have rewards or feedback more often than the other's, or sooner, those
that have any are not alike. So the share of sessions with a value is tested too, in both directions. Once it differs,
the signal no longer decides.

**Silence.** That may take longer than a reward takes to decide, and users who are not content may leave and say
nothing. So "better" must be proven twice: for the sessions that have a value, and for all sessions, with the value 0
for those that have none. Both must be true, so the error rate needs no correction (intersection-union test).

**Fails closed.** If a value is not a number, or outside its scale, its signal cannot be compared, and the policy is not
promoted. If the champion answered no calls, there is nothing to compare with, and the policy is not promoted either.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal

from art_patch.promotion.bets import SIGNALS, Bets, CanaryConfig, Signal, add_bets, begin_bets, is_on_scale
from art_patch.promotion.evidence import Evidence
from art_patch.types import JSON

Action = Literal["go on", "roll back", "promote", "inconclusive"]

# A control group tests one champion for good. Its rate of false alarms is that of so many days.
CONTROL_DAYS = 30

# A test that is not decided after so long goes on only while it may still be decided. Two days, since the first hours
# of a test tell too little of later ones: feedback that comes late, for one, is missing then.
_PATIENCE_HOURS = 48.0
# It may be decided if the difference can be large enough, that is, at most so many standard errors above what it seems.
_HOPE = 4.0


@dataclass(frozen=True, slots=True)
class WatchVerdict:
    """The decision on the policy under test, with its reason as a sentence and the metrics behind it."""

    action: Action
    reason: str
    metrics: JSON
    # Percent of the sessions that a canary should answer from now on; `None` if it should keep its share.
    percent: float | None = None


def decide(
    evidence: Evidence, *, state: Literal["shadow", "canary"], hours: float, config: CanaryConfig
) -> WatchVerdict:
    """Decide whether the test goes on, or the policy under test is rolled back or promoted, from all evidence so far.

    A `shadow` is never promoted, because no user has got its answers. `hours` is how long the test has been running.
    """
    found = [_examine(signal, evidence, config) for signal in SIGNALS]
    metrics: dict[str, Any] = {"challenger": asdict(evidence.challenger), "champion": asdict(evidence.champion)}
    metrics |= {"hours": _finite(hours), "signals": {one.signal.name: one.metrics for one in found}}
    worse, better, bars = (
        "; ".join(one.sentence for one in found if one.says == says) for says in ("worse", "better", "unreadable")
    )
    # In this order: a rollback needs no other condition, a promotion needs all of them.
    if worse:
        return WatchVerdict("roll back", worse, metrics)
    missing = bars or _missing(evidence, state, config) or _contradicts(found, config)
    if better and not missing:
        return WatchVerdict("promote", better, metrics)
    begun, arrive = evidence.challenger.sessions + evidence.champion.sessions, evidence.sessions_a_day(hours)
    needed = _sessions_needed(found, begun, config)
    metrics |= {"sessions_needed": _finite(needed), "sessions_a_day": _finite(arrive)}
    unequal = "; ".join(one.sentence for one in found if one.says == "unequal")
    if not (so_far := missing or unequal):
        silent = [one.sentence for one in found if one.says == "silent"]
        so_far = "; ".join(silent or ["neither worse nor better is proven yet"]) + _so_far(needed, arrive)
    if not hours < config.max_hours:  # a clock that gives no number ends the test, too
        return WatchVerdict("inconclusive", f"no answer within {config.max_hours:g} hours: {so_far}", metrics)
    if not evidence.is_whole:  # what comes now would not be seen, harm included
        return WatchVerdict("inconclusive", f"no answer in as many calls as one test may have: {so_far}", metrics)
    left = arrive * (config.max_hours - hours) / 24
    is_compared = any(one.bets is not None and one.signal.promotes for one in found)
    hope = _sessions_needed(found, begun, config, hope=_HOPE)
    # What is proven better waits for what it lacks, such as sessions; where silence is unequal, a judge may still come.
    if hours >= _PATIENCE_HOURS and is_compared and not (better or unequal) and hope > left:
        many = "any number of" if hope == math.inf else f"at least {hope:,.0f} more"
        reason = f"this traffic cannot decide: that takes {many} sessions, and {left:,.0f} come within"
        return WatchVerdict("inconclusive", f"{reason} {config.max_hours:g} hours; {so_far}", metrics)
    return WatchVerdict("go on", so_far, metrics, _share(evidence, found, config) if state == "canary" else None)


def decide_control(evidence: Evidence, *, begin: float, config: CanaryConfig) -> WatchVerdict:
    """Decide whether the champion (`challenger` in the evidence) is worse than upstream: "roll back" or "go on".

    The champion's tolerances are those of a policy under test. `begin` is when the evidence begins (seconds since the
    epoch), which is when the test began if the evidence is whole.
    """
    found = [_examine(signal, evidence, config, begin) for signal in SIGNALS]
    metrics: dict[str, Any] = {"champion": asdict(evidence.challenger), "upstream": asdict(evidence.champion)}
    metrics |= {"begin": begin, "signals": {one.signal.name: one.metrics for one in found}}
    if worse := "; ".join(one.sentence for one in found if one.says == "worse"):
        return WatchVerdict("roll back", worse, metrics)
    told = [one.sentence for one in found if one.says == "unequal"]
    return WatchVerdict("go on", "; ".join(told) or "not proven worse than upstream", metrics)


def _contradicts(found: Sequence["_Finding"], config: CanaryConfig) -> str:
    """Return a signal by which a policy that may be a little worse seems worse: one that says little outvotes none."""
    for one in found if config.margin < 0 else ():
        if one.signal.promotes and one.says in ("open", "silent") and one.metrics["difference"] < config.margin:
            # Each session is weighted by the share of its policy, so of a few the estimate may be more than all.
            loss, error, count = min(-one.metrics["difference"], 1.0), one.metrics["error"], one.metrics["compared"]
            size = f"{loss:.3f}{'' if error is None else f' ± {2 * error:.3f}'} of 1"
            return f"by {one.signal.words} it seems worse, by {size} as estimated from {count} sessions of its own"
    return ""


@dataclass(frozen=True, slots=True)
class _Finding:
    signal: Signal
    says: Literal["worse", "better", "open", "silent", "unequal", "unreadable", "no data"]
    sentence: str
    metrics: JSON
    bets: Bets | None = None
    with_silence: Bets | None = None


def _examine(signal: Signal, evidence: Evidence, config: CanaryConfig, begin: float | None = None) -> _Finding:
    """Test one signal in both directions; for a control group, `begin` is when the evidence begins."""
    seen = evidence.observations.get(signal.name, ())
    ours, theirs = ([one.value for one in seen if one.challenger is which] for which in (True, False))
    theirs += [one.champions for one in seen if one.champions is not None]
    # A failure is known at once, so it may speak before any session of the champion has ended.
    if not ours or not (theirs or evidence.champion.calls):
        return _Finding(signal, "no data", f"no {signal.words} of both yet", {"says": "no data", "compared": 0})
    if (wrong := next((one for one in ours + theirs if not is_on_scale(one, signal)), None)) is not None:
        scale = "a time" if signal.is_time else "from 0 to 1"
        sentence = f"a value of {signal.words} is {wrong}, not {scale}, so it cannot be compared"
        metrics = {"says": "unreadable", "compared": len(ours), "value": str(wrong)}
        return _Finding(signal, "unreadable", sentence, metrics)
    tolerance: float = getattr(config, signal.tolerance)
    bets = begin_bets(signal, tolerance, config.margin)
    if begin is not None:
        bets.spread(CONTROL_DAYS * 86_400, begin=begin, is_whole=evidence.is_whole)
    add_bets(bets, signal, seen, tolerance)
    losing = config.losing_alpha(signal) if begin is None else config.alpha * signal.control_share
    winning = config.winning_alpha
    typical = median if signal.is_time else fmean
    every = evidence.with_silence.get(signal.name)
    with_silence = None
    if every is not None:
        add_bets(with_silence := begin_bets(signal, tolerance, config.margin), signal, every, tolerance)
    heard = Bets(0.5)
    for one in evidence.heard.get(signal.name, ()):
        heard.add(one, one.value)
    says = "open"
    if max(heard.most_better, heard.most_worse) >= 2 / config.alpha:
        says = "unequal"
    elif bets.most_worse >= 1 / losing:
        says = "worse"
    elif signal.promotes and bets.most_better >= 1 / winning:
        is_proven = with_silence is None or with_silence.most_better >= 1 / winning
        says = "better" if is_proven else "silent"
    metrics = {
        "says": says, "compared": len(ours), "challenger": typical(ours),
        **({"champion": typical(theirs)} if theirs else {}), "tolerance": tolerance,
        "worse": _shown(bets.most_worse), "worse_needed": round(1 / losing, 1),
    }  # fmt: skip
    if signal.promotes:
        metrics |= {"better": _shown(bets.most_better), "better_needed": round(1 / winning, 1)}
        if with_silence is not None:
            metrics["better_with_silence"] = _shown(with_silence.most_better)
    if not signal.is_time:
        sign = 1 if signal.is_good else -1
        metrics |= {"difference": sign * bets.difference, "error": _finite(bets.error)}
    sentence = _sentence(signal, says, metrics, evidence, config)
    return _Finding(signal, says, sentence, metrics, bets, with_silence)


def _sentence(signal: Signal, says: str, metrics: JSON, evidence: Evidence, config: CanaryConfig) -> str:
    if says == "unequal":
        ours, theirs = (
            fmean(one.value for one in evidence.heard[signal.name] if one.challenger is which)
            for which in (True, False)
        )
        return (
            f"{signal.words} is known of {ours:.0%} of its sessions and of {theirs:.0%} of the champion's, "
            "so these are not alike and are not compared"
        )
    show, by = "{:.0f} ms" if signal.is_time else "{:.3f}", ""
    if says == "worse":
        tolerance = metrics["tolerance"]
        by = f"more than {tolerance:g} times the champion's" if signal.is_time else "worse"
        by += f" by more than {tolerance:g}" if tolerance and not signal.is_time else ""
    elif says in ("better", "silent"):
        by = f"not worse by {-config.margin:g}" if config.margin < 0 else "better"
        by += f" by more than {config.margin:g}" if config.margin > 0 else ""
        by += " where there is any, but that is not proven with silence counted as 0" if says == "silent" else ""
    numbers = " against ".join(show.format(metrics[arm]) for arm in ("challenger", "champion") if arm in metrics)
    return f"its {signal.words}{by and f' is {by}'}: {numbers} in {metrics['compared']} sessions"


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


def _sessions_needed(found: Iterable[_Finding], begun: int, config: CanaryConfig, *, hope: float = 0.0) -> float:
    """How many more sessions, of both policies, a promotion takes if the difference stays as it is.

    `begun`: the number of sessions so far, few of which may have a value. `hope`: by how many standard errors the
    difference may be better than it seems.
    """
    winning = config.winning_alpha
    needed = [math.inf]
    for one in found:
        if one.signal.promotes and one.says in ("open", "silent"):
            both = [bets for bets in (one.bets, one.with_silence) if bets is not None]
            per_value = [max(1.0, begun / bets.sessions) if bets.sessions else 1.0 for bets in both]
            more = [_needed(bets, winning, config.margin, hope) for bets in both]
            needed.append(max(value * each for value, each in zip(more, per_value, strict=True)))
    return min(needed)


def _needed(bets: Bets, winning: float, margin: float, hope: float) -> float:
    if bets.most_better >= 1 / winning:
        return 0.0  # a proof stands, whatever came after it
    gain = bets.difference + (hope * bets.error if hope else 0.0) - margin
    if not gain > 0:
        return math.inf
    # Where the error is not known yet, too little is known to give up.
    return max(bets.sessions_needed(winning, gain) - bets.sessions, 0.0) if math.isfinite(gain) else 0.0


def _so_far(needed: float, arrive: float) -> str:
    if not math.isfinite(needed) or round(needed) == 0:  # an estimate of none is no proof
        return ""
    days = f", {needed / arrive:.1f} days" if arrive else ""
    return f"; if it goes on like this, about {needed:,.0f} more sessions{days}"


def _share(evidence: Evidence, found: Sequence[_Finding], config: CanaryConfig) -> float | None:
    """Return the percent of the sessions from now on; `None` for no change. A share that a person chose later stays."""
    if not evidence.percents:
        return None
    first, now = evidence.percents[0], evidence.percents[-1]
    if now not in (first, *(percent for _, percent in config.ramp)):
        return None
    against = max((one.bets.worse for one in found if one.bets is not None), default=1.0)
    if against > math.e:
        return first if now > first else None
    own = evidence.challenger.sessions
    reached = max((percent for sessions, percent in config.ramp if own >= sessions), default=0.0)
    return reached if reached > now and against <= 1.5 else None


def _shown(wealth: float) -> float:
    return round(min(wealth, 1e12), 3)  # it grows without limit while a winner cannot be promoted


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 4) if math.isfinite(value) else None
