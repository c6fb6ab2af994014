"""Compares the champion's answers with upstream's: "switch", "do not switch" or "not enough data", with reasons.

Quality decides first: if the champion is worse than upstream by more than `max_loss`, or fails more often, the advice
is not to switch. Then costs decide: if the champion is as good but costs more, the advice is not to switch; if it is
better, the advice is to switch. If prices are not known, only quality decides, and a reason says so. With too few
scores there is no verdict, however much money the champion saves.

Only runs in which one policy, or upstream, answered all calls are compared. Runs without a score are reported
separately, never counted as zero. If another model answers for upstream since some moment of the period, nothing that
upstream did before is compared; the money is that of the whole period.

Costs are in US dollars. Upstream is priced by tokens. For our policies' answers the tokens are counted with our
tokenizer; the provider's tokenizer may count a few per cent more or fewer. A GPU is charged for the time in which an
engine was announced to the apps, busy or idle. An update is charged for the time that it ran, even if it made no
policy.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, variance
from typing import Any, Literal

from art_patch.gate import lower_bound
from art_patch.types import RunValue, Served, UpstreamChange, Usage

Prices = Callable[[str], tuple[float, float] | None]
"""Model that the app asked for -> US dollars for a million prompt tokens, and for a million tokens of answers."""


@dataclass(frozen=True, slots=True)
class Money:
    """The costs of a period in US dollars; an amount that is not known is `None`."""

    upstream_usd: float | None  # cost of the answers that upstream gave
    avoided_usd: float | None  # what upstream would have charged for the answers that our policies gave
    gpu_usd: float | None  # cost of the engine's GPUs
    judge_usd: float | None
    training_usd: float | None  # cost of all updates, including those that made no policy
    notes: tuple[str, ...] = ()  # sentences about unknown amounts, and about updates that made no policy

    @property
    def spent_usd(self) -> float | None:
        """Total cost of the engine's GPUs, of the judge and of training; `None` if one of them is not known."""
        return _sum(self.gpu_usd, self.judge_usd, self.training_usd)

    @property
    def saved_usd(self) -> float | None:
        """`avoided_usd` minus `spent_usd`: negative if our policies cost more than upstream would have charged."""
        return None if self.avoided_usd is None or self.spent_usd is None else self.avoided_usd - self.spent_usd

    @property
    def saved_if_all_usd(self) -> float | None:
        """The savings if our policies had also given upstream's answers, with the same `spent_usd`."""
        return None if self.saved_usd is None or self.upstream_usd is None else self.saved_usd + self.upstream_usd

    def as_facts(self) -> dict[str, Any]:
        """Return the amounts, their sums and the notes by name."""
        return asdict(self) | {name: getattr(self, name) for name in ("spent_usd", "saved_usd", "saved_if_all_usd")}


def count_money(usage: Usage, prices: Prices, *, gpu_usd_per_hour: float | None) -> Money:
    """Return the costs and savings of the period that `usage` covers.

    `gpu_usd_per_hour` is the price of all GPUs of the engine together; an update is assumed to use as many GPUs.
    """
    notes: list[str] = []
    upstream_usd, avoided_usd, unpriced = _upstream(usage.served, prices)
    if unpriced:
        notes.append(f"no price is known for {', '.join(unpriced)}: give --upstream-price IN OUT")
    if unmetered := sum(each.unmetered for each in usage.served):
        notes.append(f"{unmetered} answered calls tell no tokens; they count as if they were free")
    window_s = usage.until - usage.since
    # Counted too high rather than too low: a report must not promise savings that are not there.
    engine_s = window_s if usage.engine_s is None else usage.engine_s
    if gpu_usd_per_hour is None:
        notes.append("no price of a GPU hour is known: give --gpu-usd-per-hour, 0 if it costs nothing more")
    elif usage.engine_s is None and any(each.policy is not None for each in usage.served):
        notes.append("no engine told since when it serves: its GPU counts for the whole time")
    # A sum without some of the answers would be too low.
    judge_usd = None if usage.judge_unpriced else usage.judge_usd
    if usage.judge_unpriced:
        known = f", at least ${usage.judge_usd:.2f}" if usage.judge_usd else ""
        notes.append(f"{usage.judge_unpriced} calls of the judge have no known price{known}")
    # Without updates training cost nothing, whatever a GPU hour costs.
    training_usd = _hours(usage.update_s, gpu_usd_per_hour) if usage.update_s or usage.updates else 0.0
    if usage.updates_lost:
        notes.append(f"updates that made no policy: {usage.updates_lost}; the time that they took counts")
    # One update of unknown length makes the sum unknown; a partial sum would look like the whole.
    if usage.updates_untimed:
        training_usd = None
        notes.append(f"{usage.updates_untimed} of {usage.updates} updates do not say how long they took")
    if usage.erased:
        notes.append(f"runs erased since this time began: {usage.erased}; what was paid for them is not counted")
    return Money(upstream_usd, avoided_usd, _hours(engine_s, gpu_usd_per_hour), judge_usd, training_usd, tuple(notes))


def _upstream(served: Iterable[Served], prices: Prices) -> tuple[float | None, float | None, list[str]]:
    """Return upstream's cost of its own answers and of our policies' answers, and the models without a price."""
    sums: list[float | None] = [0.0, 0.0]
    unpriced: set[str] = set()
    for each in served:
        for model, (prompt, completion) in each.tokens.items():
            ours = each.policy is not None
            before, price = sums[ours], prices(model)
            if price is None:
                unpriced.add(model)
                sums[ours] = None  # one unknown price makes the whole sum unknown
            elif before is not None:
                sums[ours] = before + (prompt * price[0] + completion * price[1]) / 1e6
    return sums[0], sums[1], sorted(unpriced)


def _hours(seconds: float, usd_per_hour: float | None) -> float | None:
    return None if usd_per_hour is None else seconds / 3_600 * usd_per_hour


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


Answer = Literal["switch", "do not switch", "not enough data"]

LEVEL = 0.95
MIN_CALLS = 100  # of each side, before their failures are compared
MIN_RUNS = 30  # with a reward, of each side
MIN_GROUPS = 12  # that were judged with runs of both sides in them
_MOST_GROUPS = 1_000  # more would take seconds and make the limits hardly narrower
_MORE_FAILURES = 0.01  # difference of the shares of failed calls that does not matter
_MANY_FALLBACKS = 0.05  # share of calls; above it a caution is given
_SLOWER = 1.5  # ratio of the 95th percentiles of latency; above it a caution is given


@dataclass(frozen=True, slots=True)
class Comparison:
    """The champion (`ours`) and upstream (`theirs`), compared by one kind of score."""

    kind: Literal["reward", "judged"]  # scores of users or code; the judge's scores within a group
    ours: float | None  # mean score; `None` if no run is scored
    theirs: float | None
    ours_scored: int  # runs with such a score; for `judged`, groups with runs of both
    theirs_scored: int
    low: float | None = None  # limits of `difference`, each with 97.5 % confidence; `None` with too few scores
    high: float | None = None

    @property
    def difference(self) -> float | None:
        """The champion's mean minus upstream's; `None` if one of them is not known."""
        return None if self.ours is None or self.theirs is None else self.ours - self.theirs


@dataclass(frozen=True, slots=True)
class Side:
    """A column of the report: calls of one side. A share or duration is `None` where there is nothing to measure."""

    name: str  # of the champion, or `other policies`, or `upstream`
    calls: int
    share: float | None  # `calls` as a share of all calls
    failed: float | None  # share of these calls that ended in an error
    p50_ms: float | None  # median of the answers' duration
    p95_ms: float | None  # 95 % of the answers took no longer than this


@dataclass(frozen=True, slots=True)
class Report:
    """The advice whether to switch from upstream to the champion. Times are seconds since the epoch."""

    since: float
    until: float
    verdict: Answer
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]  # why the verdict may be wrong, such as a large share of fallbacks
    sides: tuple[Side, ...]  # the champion, all other policies together, and upstream
    fell_back: float | None  # share of the calls meant for our policies that fell back; `None` if there were none
    fallbacks: dict[str, int]  # number of the calls that fell back to upstream, by reason
    comparisons: tuple[Comparison, ...]  # by rewards, and by the judge's scores
    unscored: dict[str, int]  # number of runs without any score, for the champion and for upstream
    mixed: int  # number of runs that more than one policy answered; they are not compared
    money: Money
    upstream_change: UpstreamChange | None  # since when another model answers for upstream
    outdated: int  # number of upstream's runs that an earlier model began; they are not compared


def make_report(
    usage: Usage, prices: Prices, *, gpu_usd_per_hour: float | None = None, max_loss: float = 0.05
) -> Report:
    """Return the advice whether to switch; a mean score at most `max_loss` lower than upstream's counts as good."""
    champion, upstream, others = _three(usage)
    money = count_money(usage, prices, gpu_usd_per_hour=gpu_usd_per_hour)
    comparisons = (compare_rewards(usage.runs, usage.champion), compare_judged(usage.runs, usage.champion))
    # Rewards first: they are the users' own, and judged groups only stand in for them.
    decisive = next((each for each in comparisons if each.low is not None), None)
    all_calls = sum(each.calls for each in usage.served)
    fallbacks = sum(usage.fell_back.values())
    # Fallbacks were answered by upstream and count there, so they are added here.
    meant = sum(each.calls for each in (champion, others)) + fallbacks
    sides = [
        _side(usage.champion or "no champion", champion, all_calls),
        _side("other policies", others, all_calls),
        _side("upstream", upstream, all_calls),
    ]
    theirs = upstream if usage.upstream_now is None else usage.upstream_now
    verdict, reasons = _verdict(usage, champion, theirs, comparisons, money, max_loss)
    return Report(
        since=usage.since,
        until=usage.until,
        verdict=verdict,
        reasons=tuple(reasons),
        cautions=tuple(_cautions(usage, decisive, champion, theirs, fallbacks / meant if meant else 0.0)),
        sides=tuple(side for side in sides if side.calls or side.name != "other policies"),
        fell_back=fallbacks / meant if meant else None,
        fallbacks=dict(usage.fell_back),
        comparisons=comparisons,
        unscored={
            name: sum(
                # No user saw a copy, so none could have scored it.
                run.policy == policy and run.reward is None and run.judged is None and not run.copy
                for run in usage.runs
            )
            for name, policy in (("champion", usage.champion), ("upstream", None))
            if name == "upstream" or policy is not None
        },
        mixed=usage.mixed,
        money=money,
        upstream_change=usage.upstream_change,
        outdated=usage.outdated,
    )


def _verdict(
    usage: Usage, champion: Served, upstream: Served, comparisons: Sequence[Comparison], money: Money, max_loss: float
) -> tuple[Answer, list[str]]:
    if usage.champion is None:
        return "not enough data", [
            "no policy serves; start `art-patch serve --base MODEL`, or promote one that was retired"
        ]
    # Before the scores, because calls that fail get no score and would not be missed there.
    if (worse := _fails_more(champion, upstream)) is not None:
        return "do not switch", [worse]
    found = next((each for each in comparisons if each.low is not None and each.high is not None), None)
    if found is None or found.low is None or found.high is None:
        return "not enough data", [_what_is_missing(comparisons)]
    said = _in_words(found)
    # The whole interval is below the largest loss: worse. A part of it is: unknown. None of it is: good enough.
    if found.high < -max_loss:
        return "do not switch", [f"{said}: worse by more than the largest loss of {max_loss:g}"]
    if found.low <= -max_loss:
        needed = prompts_needed(found, max_loss)
        more = "more would hardly help" if needed is None else f"if it is as it looks, about {needed:,} would tell"
        counted = "runs with a reward of each" if found.kind == "reward" else "groups with both"
        many = f"{min(found.ours_scored, found.theirs_scored):,} {counted}"
        return "not enough data", [f"{said}: it may be worse by more than {max_loss:g}; {many}, {more}"]
    better = found.low > 0
    reasons = [f"{said}: {'better' if better else f'as good, not worse by more than {max_loss:g}'}"]
    saved = money.saved_if_all_usd
    if saved is None:
        return "switch", [*reasons, "on quality alone: what it costs is not known"]
    if saved > 0:
        return "switch", [*reasons, f"with every call it would have saved ${saved:,.2f} in this time"]
    reasons.append(f"with every call it would have cost ${-saved:,.2f} more than upstream in this time")
    return ("switch", [*reasons, "it pays in quality only"]) if better else ("do not switch", reasons)


def prompts_needed(found: Comparison, max_loss: float) -> int | None:
    """Return how many scores of each side would probably prove a loss of at most `max_loss`, with a power of 80 %.

    `None` if no number would: the champion seems to be worse by more than that, or there are no limits yet.
    """
    difference, low, high = found.difference, found.low, found.high
    if difference is None or low is None or high is None or difference + max_loss <= 0:
        return None
    z_level, z_power = map(NormalDist().inv_cdf, ((1 + LEVEL) / 2, 0.8))
    # Limits come closer with the root of the number of scores.
    shrink = (high - low) / 2 * (1 + z_power / z_level) / (difference + max_loss)
    return math.ceil(min(found.ours_scored, found.theirs_scored) * shrink**2)


def _fails_more(champion: Served, upstream: Served) -> str | None:
    if min(champion.calls, upstream.calls) < MIN_CALLS:
        return None
    ours, theirs = ([1.0] * each.failed + [0.0] * (each.calls - each.failed) for each in (champion, upstream))
    if difference_interval(ours, theirs)[0] <= _MORE_FAILURES:  # the difference may be chance, or too small to matter
        return None
    shares = [each.failed / each.calls for each in (champion, upstream)]
    return f"{shares[0]:.1%} of its calls fail, {shares[1]:.1%} of upstream's: more than chance explains"


def _what_is_missing(comparisons: Sequence[Comparison]) -> str:
    rewards, judged = comparisons
    return (
        f"{rewards.ours_scored} of its runs and {rewards.theirs_scored} of upstream's have a reward of yours "
        f"({MIN_RUNS} each are needed), and {judged.ours_scored} groups were judged with both in them "
        f"({MIN_GROUPS} are needed)"
    )


def _in_words(found: Comparison) -> str:
    what = "your rewards" if found.kind == "reward" else "the judge's scores in groups with both"
    limits = f"between {found.low:+.3f} and {found.high:+.3f}"
    return f"by {what} the difference to upstream is {found.difference:+.3f}, {limits}"


def _cautions(
    usage: Usage, decisive: Comparison | None, champion: Served, upstream: Served, fell_back: float
) -> list[str]:
    said: list[str] = []
    if fell_back > _MANY_FALLBACKS:
        said.append(f"{fell_back:.0%} of the calls meant for our policies went upstream after all")
    ours, theirs = (quantile(each.latencies_ms, 0.95) for each in (champion, upstream))
    if ours is not None and theirs is not None and ours > _SLOWER * theirs:
        said.append(f"its slow answers (p95) take {ours / theirs:.1f} times as long as upstream's")
    # Groups compare runs of one task; rewards of two sides may come from different users or times of day.
    if decisive is not None and decisive.kind == "reward" and usage.mode != "canary":
        said.append("who answered was not drawn by lot, so the runs may differ; `art-patch mode canary` draws")
    return said


def _three(usage: Usage) -> tuple[Served, Served, Served]:
    """Return the champion's calls, upstream's, and those of all other policies together."""
    by = {each.policy: each for each in usage.served}
    upstream = by.pop(None, Served(None))
    champion = by.pop(usage.champion, Served(usage.champion))
    calls, failed = sum(each.calls for each in by.values()), sum(each.failed for each in by.values())
    latencies_ms = tuple(sorted(ms for each in by.values() for ms in each.latencies_ms))
    return champion, upstream, Served("other policies", calls, failed, latencies_ms)


def _side(name: str, served: Served, all_calls: int) -> Side:
    return Side(
        name,
        served.calls,
        served.calls / all_calls if all_calls else None,
        served.failed / served.calls if served.calls else None,
        quantile(served.latencies_ms, 0.5),
        quantile(served.latencies_ms, 0.95),
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the quantile of values in ascending order: at least the fraction `share` of them is not above it.

    It is one of the values; `None` if there are none.
    """
    # The product may come out just above a whole number (0.07 * 100 does), which `ceil` would take to the next one.
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)] if ordered else None


def compare_rewards(runs: Sequence[RunValue], champion: str | None) -> Comparison:
    """Compare the runs of the champion with those of upstream by the rewards that users or the app's code gave."""
    # These rewards have one scale for all runs, so the means of both sides can be compared. Copies only repeat them.
    given = [(run.policy, run.reward) for run in runs if run.reward is not None and not run.copy]
    ours = [reward for policy, reward in given if policy == champion and champion is not None]
    theirs = [reward for policy, reward in given if policy is None]
    means = (fmean(ours) if ours else None, fmean(theirs) if theirs else None)
    limits = difference_interval(ours, theirs) if min(len(ours), len(theirs)) >= MIN_RUNS else ()
    return Comparison("reward", *means, len(ours), len(theirs), *limits)


def compare_judged(runs: Sequence[RunValue], champion: str | None) -> Comparison:
    """Compare the runs of the champion with those of upstream by the judge's scores.

    A judge's scores can be compared only within a group, so each group with runs of both gives one difference. Copies
    of calls that no user saw are included.
    """
    groups: defaultdict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for run in runs:
        if run.group_id is not None and run.judged is not None and run.policy in (champion, None):
            groups[run.group_id][run.policy is None].append(run.judged)
    pairs = [(fmean(ours), fmean(theirs)) for ours, theirs in groups.values() if ours and theirs]
    # The newest groups: the dictionary keeps the order of the runs, and these come oldest first.
    pairs = pairs[-_MOST_GROUPS:]
    # Without a champion every run here is upstream's, and there is nothing to compare.
    if champion is None or not pairs:
        return Comparison("judged", None, None, 0, 0)
    means = (fmean(ours for ours, _ in pairs), fmean(theirs for _, theirs in pairs))
    limits: tuple[float, ...] = ()
    if len(pairs) >= MIN_GROUPS:
        differences = [ours - theirs for ours, theirs in pairs]
        # Each side errs in 2.5 % of cases, so both limits hold together in 95 %.
        side = (1 + LEVEL) / 2
        limits = lower_bound(differences, side), -lower_bound([-each for each in differences], side)
    return Comparison("judged", *means, len(pairs), len(pairs), *limits)


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the difference of two means (`ours` minus `theirs`).

    The method is Agresti and Caffo's, "Simple and effective confidence intervals for proportions", The American
    Statistician 54, 2000, extended from proportions to values on a bounded scale: the lowest and the highest value of
    the scale are added to `ours` and to `theirs`. The scale is 0 to 1, or wider if there are values outside of it.
    """
    low, high = min(0.0, *ours, *theirs), max(1.0, *ours, *theirs)
    a, b = ([*values, low, high] for values in (ours, theirs))
    middle = fmean(a) - fmean(b)
    # Of the mean of n values: n in place of n - 1, so that for shares it is the formula of the paper.
    error = math.sqrt(sum(variance(values) * (len(values) - 1) / len(values) ** 2 for values in (a, b)))
    width = NormalDist().inv_cdf((1 + LEVEL) / 2) * error
    return middle - width, middle + width
