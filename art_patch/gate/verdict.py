"""What the values of both policies prove: the gate's verdict by the judge, and whether other signals agree with it.

In: the judge's scores of both policies on the same turns. Out: a verdict with its reason and metrics. Pure.

- **Superiority test.** The null hypothesis is that the candidate is better than the champion by at most `margin`. The
  candidate wins if the lower confidence bound of the mean difference (`lower_bound`) lies above `margin`.
- **Worst scenarios.** A candidate that is a little better on most scenarios and ruins the others can win that test by
  chance, because few of the ruined ones are asked. So it must not lose more in the worst scenarios than it gains in as
  many, the best ones. For two policies that are equal, both are alike.
- **Cannot decide.** With too few scenarios the gate cannot decide. With too few users it cannot decide either, whatever
  it sees: users differ, and few of them say nothing about the others. A canary can (`Verdict.needs_canary`).
- **Fails closed.** A score that is not finite, or a tie of the policies, rejects the candidate.

A policy can learn to please the judge while its answers become worse. Then the judge's scores rise, and the app's own
rewards, its users' feedback or another judge's scores fall. So gate and canary show all of these gains side by side.
They name the disagreement as soon as it is proven, and until then they say how many values that takes (`agreement`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

from art_patch.gate import paired_test
from art_patch.gate.paired_test import NO_USERS, TIE, Finding, GateConfig, Pair, lower_bound, mean, spread
from art_patch.types import JSON

# A reason names so many scenarios; keys may be as long as a prompt.
_NAMED, _KEY_CHARS = 5, 60

_NO_GROUPS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate wins the gate, with the reason as a sentence and the metrics behind it."""

    promote: bool
    reason: str
    metrics: JSON
    # It wins on the scenarios of the users who are known, who are too few to stand for all; a canary may decide.
    needs_canary: bool = False
    # The difference is above the margin, proven or not, and no check failed.
    seems_better: bool = False


def decide(
    scores: Iterable[Pair], config: GateConfig, *, user_of: Mapping[str, str | None] = NO_USERS,
    group_of: Mapping[str, str] = _NO_GROUPS, seed: int = 0,
) -> Verdict:  # fmt: skip
    """Decide from both policies' scores of each turn whether the candidate wins.

    `user_of` has the users of the scenarios; a scenario without one stands for itself. `group_of` has the groups by
    which reason and metrics name scenarios, since a key may be what a user wrote, and both outlive an erasure. `seed`
    draws the subsets of the bound.
    """
    pairs = list(scores)
    for key, ours, theirs in pairs:
        if not (math.isfinite(ours) and math.isfinite(theirs)):
            words = f"a score of scenario {_short(group_of.get(key, key))} is not finite"
            return Verdict(False, words, {"scenarios": 0})
    by_scenario, units = paired_test.scenario_means(pairs, user_of)
    users = len({user_of.get(key) for key in by_scenario} - {None})
    count, least = len(by_scenario), max(config.min_scenarios, paired_test.fewest(config.level))
    metrics: dict[str, Any] = {"scenarios": count} | ({"users": users} if users else {})
    if count < least:
        metrics["more_needed"] = least - count
        words = f"cannot decide: {count} held-out scenarios; {least - count} more are needed, because fewer hardly "
        return Verdict(False, words + "ever show a task that the candidate ruins", metrics)
    # Units are users, and scenarios whose users are not known.
    least_users = max(config.min_users if users else 1, paired_test.fewest(config.level))
    too_few = len(set(units)) < least_users
    by_unit = None if too_few else units
    differences = {key: ours - theirs for key, (ours, theirs) in by_scenario.items()}
    values = list(differences.values())
    bound = lower_bound(values, config.level, units=by_unit, seed=seed)
    metrics["candidate"], metrics["champion"] = paired_test.means_of(by_scenario.values())
    metrics |= {"difference": mean(values), "lower_bound": bound}
    # Above and not equal: a candidate that answers like the champion has a bound of exactly 0 and must not win.
    wins = bound > config.margin + TIE
    if not wins and all(abs(difference) <= TIE for difference in values):
        tie = f"a tie: both score alike on each of {count} held-out scenarios, not above the margin"
        return Verdict(False, tie, metrics)
    needed = None if wins else paired_test.scenarios_needed(values, config.margin, config.level, units=by_unit)
    if needed is not None:
        metrics["more_needed"] = needed - count
    reason = _reason(metrics, config, wins)
    ruined, words = _ruined({group_of.get(key, key): value for key, value in differences.items()}, config)
    if ruined:
        metrics["ruined"] = ruined
        reason = f"{reason}; {'but' if wins else 'besides,'} {words}"
    if too_few:
        metrics["users_needed"] = least_users
        reason = (
            f"cannot decide: the scenarios come from {users} user{'s' * (users > 1)}, at least {least_users} are "
            f"needed to speak for others, so a canary must decide (--promotion canary); for these alone: {reason}"
        )
    passed = wins and not ruined
    seems = not ruined and metrics["difference"] > config.margin + TIE
    return Verdict(passed and not too_few, reason, metrics, needs_canary=passed and too_few, seems_better=seems)


def results(pairs: Iterable[Pair], group_of: Mapping[str, str]) -> list[JSON]:
    """Return both policies' mean scores of each scenario, by the id of its group: the candidate's worst first.

    By the group, since a scenario's key may be what a user wrote.
    """
    means, _ = paired_test.scenario_means(pairs, NO_USERS)
    found = [
        {"group": group_of[key], "candidate": ours, "champion": theirs}
        for key, (ours, theirs) in means.items()
        if key in group_of and math.isfinite(ours) and math.isfinite(theirs)
    ]
    return sorted(found, key=lambda one: one["candidate"] - one["champion"])


def with_findings(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """Return the verdict; if a check failed, it becomes a rejection whose reason names every failed check."""
    failed = [finding.words for finding in findings if not finding.passed]
    if not failed:
        return verdict
    lead = "it wins, but" if verdict.promote else "besides,"
    reason = f"{verdict.reason}; {lead} {'; '.join(failed)}"
    return replace(verdict, promote=False, needs_canary=False, seems_better=False, reason=reason)


def false_promotions(gated_at: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return the gate runs a year, and how many of them promote a policy that is only equal, if all are.

    `gated_at` has the times of all gate runs so far, in seconds. `None` if they are within one day.
    """
    days = (max(gated_at) - min(gated_at)) / 86_400 if gated_at else 0.0
    if days < 1:
        return None
    runs = 365 * (len(gated_at) - 1) / days
    return runs, (1 - level) * runs


def _ruined(differences: Mapping[str, float], config: GateConfig) -> tuple[list[str], str]:
    """Return the worst scenarios, the worst first, and a sentence on them, if the candidate loses too much there."""
    order = sorted(differences, key=lambda key: (differences[key], key))
    some = math.ceil(config.worst_share * len(order) - 1e-9)
    if not some:
        return [], ""
    loss, gain = (mean([differences[key] for key in its]) for its in (order[:some], order[-some:]))
    # What a margin below 0 allows to lose is no ruin.
    allowed = max(-config.margin, 0.0)
    if -loss - allowed <= max(gain + allowed, config.max_worse) + TIE:
        return [], ""
    names = ", ".join(map(_short, order[: min(some, _NAMED)])) + (f" and {some - _NAMED} more" * (some > _NAMED))
    return order[:some], f"it ruins some: {loss:+.3f} in its worst {some} scenarios ({names}), {gain:+.3f} in its best"


def _short(key: str) -> str:
    return key if len(key) <= _KEY_CHARS else f"{key[: _KEY_CHARS - 3]}..."


def _reason(metrics: JSON, config: GateConfig, wins: bool) -> str:
    """Return the scores in words, and what they prove."""
    margin, often = config.margin, paired_test.once_in(config.level)
    equal = "both were equal"
    if margin:
        equal = f"it were {'better' if margin > 0 else 'worse'} by {abs(margin):g}"
    users = f" of {metrics['users']} users" if "users" in metrics else ""
    words = (
        f"scores {metrics['candidate']:.3f} against {metrics['champion']:.3f} "
        f"on {metrics['scenarios']} held-out scenarios{users}, a difference of {metrics['difference']:+.3f}; "
    )
    proven = "better" if margin >= 0 else f"not worse by more than {-margin:g}"
    if wins:
        return f"{words}proven {proven}: if {equal}, a result like this comes up at most {often}"
    words += f"not proven {proven}: if {equal}, a result like this comes up more than {often}"
    more = metrics.get("more_needed")
    return words if more is None else f"{words}; if it is as it looks, about {more} more scenarios would show it"


# --- agreement of judge and other signals ---

# Both limits of a gain hold together in 95 % of cases.
_SIDE = 0.975
# Of a disagreement as large as it seems: so often the number of values that is said to be needed shows it.
_POWER = 0.95


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better one policy is than another by one signal, on a scale of 0 to 1, with limits."""

    name: str  # of the signal, in words
    mean: float
    low: float  # each limit is wrong in about 2.5 % of cases
    high: float
    count: int  # of the values behind it
    unit: str  # what is counted, such as "scenarios"
    sd: float  # of one value; `math.nan` if it is not known

    @property
    def words(self) -> str:
        """The gain and its limits for people."""
        return f"{self.name} {self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f}, {self.count} {self.unit})"

    @property
    def facts(self) -> JSON:
        """The gain as metrics; without `sd`, which may be no number and which JSON could not hold."""
        return {name: value for name, value in asdict(self).items() if name != "sd"}


def paired_gain(
    name: str, pairs: Sequence[Pair], *, user_of: Mapping[str, str | None] = NO_USERS, seed: int = 0
) -> Gain:
    """Return the gain from both policies' values of each turn, with the limits of the sign-flip test."""
    by_scenario, units = paired_test.scenario_means(pairs, user_of)
    differences = [ours - theirs for ours, theirs in by_scenario.values()]
    low, high = (
        sign * lower_bound([sign * each for each in differences], _SIDE, units=units, seed=seed) for sign in (1, -1)
    )
    # Too few have no limits but those of the scale.
    return Gain(
        name, mean(differences), max(-1.0, low), min(1.0, high), len(differences), "scenarios",
        spread(differences, units),
    )  # fmt: skip


def normal_gain(name: str, values: Sequence[float], unit: str, *, is_enough: bool = True) -> Gain:
    """Return the gain from independent values whose mean is the gain, with the limits of a normal distribution.

    If the values are not enough for that (`is_enough`), or all equal, the limits are those of the scale, -1 and 1.
    """
    sd = spread(values)
    width = NormalDist().inv_cdf(_SIDE) * sd / math.sqrt(len(values)) if is_enough and sd > 0 else 2.0
    middle = min(1.0, max(-1.0, mean(values)))
    return Gain(name, middle, max(-1.0, middle - width), min(1.0, middle + width), len(values), unit, sd)


def agreement(judge: Gain, own: Gain) -> str | None:
    """Return in words that the judge's gain and another contradict each other, or how many values would tell.

    `None` if they do not differ in sign, or the judge sees no gain; one that is written as 0.000 is none.
    """
    if judge.low > 0 > own.high:
        return f"{judge.name} and {own.name} disagree: the policy may please the judge alone"
    if judge.mean < 0.0005 or own.low > 0:
        return None
    # Of a value between -1 and 1 the standard deviation is at most 1.
    steps = (NormalDist().inv_cdf(_SIDE) + NormalDist().inv_cdf(_POWER)) * (own.sd if own.sd > 0 else 1.0) / judge.mean
    needed = math.ceil(steps**2)
    if own.count >= needed:
        return None
    return f"a loss in {own.name} as large as the gain in {judge.name} takes about {needed:,} {own.unit} to show"


def gains_in_words(judge: Gain, others: Sequence[Gain]) -> str:
    """Return all gains side by side and what they say of each other; empty without others."""
    if not others:
        return ""
    said = [words for each in others if (words := agreement(judge, each)) is not None]
    return "; ".join([f"gains: {', '.join(each.words for each in (judge, *others))}", *said])
