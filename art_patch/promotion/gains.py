"""How much better the policy under test is by the judge, by the app's own rewards and by people's feedback. Pure.

The three are shown side by side with every verdict on a canary. A canary that pleases the judge while feedback falls is
so noticed before the test on feedback alone is decided, which may take many sessions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from art_patch.gate import Gain, gains_in_words, normal_gain
from art_patch.promotion.evidence import Evidence, Observation
from art_patch.promotion.sequential import WatchVerdict

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
