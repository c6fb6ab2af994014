"""Computes costs and savings in US dollars. An amount that is not known is `None`, and a note says why.

Upstream is priced by tokens. For our policies' answers the tokens are counted with our tokenizer; the provider's
tokenizer may count a few per cent more or fewer. Discounts for cached prompts are ignored, because they are not known.
A GPU is charged for the time in which an engine was announced to the apps, busy or idle. An update is charged for the
time that it ran, even if it made no policy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from art_patch.types import Served, Usage

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
    gpu_usd = _hours(engine_s, gpu_usd_per_hour)
    return Money(upstream_usd, avoided_usd, gpu_usd, judge_usd, training_usd, tuple(notes))


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
