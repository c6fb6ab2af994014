"""Notes on a comparison: the gains by judge, rewards and feedback, and how soon a control group notices a loss. Pure.

The gains are shown side by side with every verdict on a canary. A canary that pleases the judge while feedback falls is
so noticed before the test on feedback alone is decided, which may take many sessions.

A control group takes about so many days to notice a loss, at the traffic that there is. The bets of `sequential` gain,
each session, the square of the loss over twice the variance of what one session tells about it, on average. They must
gain enough for the proof, for what the unknown size of a bet costs, and for the wealth that is staked later. Where
upstream is right 91 times in 100 and a policy loses 0.2, that came to 12 to 20 in `tests/benchmarks/incumbent.py` (50
and 500 sessions a day, control groups of 5 and 20 %). Where it is right 60 times, it came to about 7, so these days are
a guide and no promise.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, variance

from art_patch.gate import Gain, gains_in_words, normal_gain
from art_patch.promotion.evidence import Evidence, Observation
from art_patch.promotion.sequential import WatchVerdict
from art_patch.types import JSON

# With fewer sessions of a policy, a few of them make most of the mean, and its limits would be too narrow.
_LEAST = 30


def with_gains(verdict: WatchVerdict, evidence: Evidence) -> WatchVerdict:
    """Return the verdict with the gains added to its metrics and its reason, if a judge scored sessions.

    The limits are those of a single look. The verdict's action does not depend on them.
    """
    rewarded = evidence.observations.get("reward", ())
    # Scores of a judge are compared within their group, so they alone have a guess.
    found = {
        "the judge": ([one for one in rewarded if one.guess is not None], "sessions"),
        "your rewards": ([one for one in rewarded if one.guess is None], "sessions with a reward"),
        "people's feedback": (evidence.observations.get("feedback", ()), "sessions with feedback"),
    }
    gains: list[Gain] = []
    for name, (seen, unit) in found.items():
        if values := list(_differences(seen)):
            own = sum(one.challenger for one in seen)
            is_enough = min(own, len(seen) - own) >= _LEAST
            gains.append(normal_gain(name, values, unit, is_enough=is_enough))
    if not gains or gains[0].name != "the judge":
        return verdict
    words = gains_in_words(gains[0], gains[1:])
    reason = f"{verdict.reason}; {words}" if words else verdict.reason
    return replace(verdict, reason=reason, metrics={**verdict.metrics, "gains": [gain.facts for gain in gains]})


def _differences(seen: Sequence[Observation]) -> Iterator[float]:
    """Return a value for each session whose mean is the difference between the policies, whatever the shares were."""
    known = [one for one in seen if 0 < one.share < 1 and one.champions is None]
    # Of both policies alike; it only makes the values vary less.
    usual = fmean(one.value for one in known) if known else 0.0
    for one in known:
        over = one.value - (usual if one.guess is None else one.guess)
        yield over / one.share if one.challenger else -over / (1 - one.share)


LOSSES = (0.1, 0.2)
"""Losses, on a scale from 0 to 1, for which people are told how long it takes to notice them."""

_NEEDED = 15.0


def notices(evidence: Evidence, *, now: float) -> dict[str, float | None]:
    """Return each of `LOSSES` -> the days until it would be noticed, by the signal that has most sessions."""
    by_signal = (evidence.observations.get(name, ()) for name in ("reward", "feedback"))
    seen: Sequence[Observation] = max(by_signal, key=len)
    if len(seen) < 2 or not 0 < (share := seen[-1].share) < 1:
        return {f"{loss:g}": None for loss in LOSSES}
    days = max(now - min(one.at for one in seen), 1.0) / 86_400
    of_one = max(variance(one.value for one in seen), 1e-4) * (1 / share + 1 / (1 - share))
    found = {f"{loss:g}": _NEEDED * 2 * of_one * days / (loss**2 * len(seen)) for loss in LOSSES}
    return {loss: each if math.isfinite(each) else None for loss, each in found.items()}


def look_in_words(look: JSON) -> str:
    """Return the newest comparison with the control group, as `Ledger.control_look` has it, in words."""
    since = time.strftime("%Y-%m-%d", time.gmtime(look["begin"]))
    sides = f"{look['champion']['sessions']:,} sessions against {look['upstream']['sessions']:,}"
    found = [
        f"{name} {'lower' if signal['difference'] < 0 else 'higher'} by {min(abs(signal['difference']), 1.0):.3f}"
        + (f" ± {2 * signal['error']:.3f}" if signal.get("error") else "")
        for name, signal in look["signals"].items()
        if name in ("reward", "feedback") and "difference" in signal
    ]
    soon = [
        f"of {loss} {'within a day' if days < 1 else f'in about {days:,.0f} days'}"
        for loss, days in look["days_to_notice"].items()
        if days is not None
    ]
    told = [f"since {since}, {sides}", *found, look["says"]]
    return "; ".join([*told, f"a loss {', '.join(soon)} would be noticed"] if soon else told)
