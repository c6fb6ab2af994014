"""Says about how many days a control group takes to notice a loss, at the traffic that there is. Pure.

The bets of `sequential` gain, each session, the square of the loss over twice the variance of what one session tells
about it, on average. They must gain enough for the proof, for what the unknown size of a bet costs, and for the wealth
that is staked later. Where upstream is right 91 times in 100 and a policy loses 0.2, that came to 12 to 20 in
`tests/benchmarks/incumbent.py` (50 and 500 sessions a day, control groups of 5 and 20 %). Where it is right 60 times,
it came to about 7, so these days are a guide and no promise.
"""

import math
import time
from collections.abc import Sequence

from art_patch.promotion.evidence import Evidence, Observation
from art_patch.types import JSON

LOSSES = (0.1, 0.2)
"""Losses, on a scale from 0 to 1, for which people are told how long it takes to notice them."""

_NEEDED = 15.0


def _days_to_notice(loss: float, *, sessions_a_day: float, control: float, variance: float) -> float:
    """Return about how many days pass until a loss of the mean reward is proven; `math.inf` without sessions.

    `sessions_a_day` are those with a reward, `control` the share of the control group (0..1), and `variance` that of
    one session's reward.
    """
    if not 0 < control < 1 or sessions_a_day <= 0:
        return math.inf
    of_one = variance / control + variance / (1 - control)
    return _NEEDED * 2 * of_one / (loss**2 * sessions_a_day)


def notices(evidence: Evidence, *, now: float) -> dict[str, float | None]:
    """Return each of `LOSSES` -> the days until it would be noticed, by the signal that has most sessions."""
    by_signal = (evidence.observations.get(name, ()) for name in ("reward", "feedback"))
    seen: Sequence[Observation] = max(by_signal, key=len)
    found: dict[str, float | None] = {f"{loss:g}": None for loss in LOSSES}
    if len(seen) < 2:
        return found
    days = max(now - min(one.at for one in seen), 1.0) / 86_400
    mean = sum(one.value for one in seen) / len(seen)
    variance = max(sum((one.value - mean) ** 2 for one in seen) / (len(seen) - 1), 1e-4)
    for loss in LOSSES:
        here = _days_to_notice(loss, sessions_a_day=len(seen) / days, control=1 - seen[-1].share, variance=variance)
        found[f"{loss:g}"] = here if math.isfinite(here) else None
    return found


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
