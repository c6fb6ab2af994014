"""What keeps a judge from being fooled, beside `planted answers`: decisions of `batch.judge_batch`. Pure.

- **Agreement**: a group that is judged in two orders must come out alike, or its scores say where an attempt stood.
- **Flags**: text that speaks to the judge (`injection`). What the policy wrote itself is capped, never raised. What
  users and tools wrote is only named: the siblings did not choose it.
- **Length**: over the batch, longer must not simply mean better.
- **Users**: nobody teaches more than a share of a batch.

With too little to go by nothing is held against anybody, and siblings that are all the same pass all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import correlation, fmean, median_low
from typing import Any, cast

from art_patch.errors import ConfigError
from art_patch.rewards.defences.injection import suspicion
from art_patch.trajectories import canonical, transcript
from art_patch.types import Group

_MIN_RANKED = 30
"""Siblings whose scores and lengths differ within their groups; with fewer, a correlation is chance."""
_MIN_USERS = 4
"""With fewer known users in a batch none can be kept to a share without starving the rest."""


@dataclass(frozen=True, slots=True)
class DefenceConfig:
    """How much a judge is trusted. All shares are from 0 to 1.

    Attributes:
        double_share: of the groups, judged a second time in the reverse order; 1 doubles what judging costs, 0 is off.
        min_agreement: of the pairs of siblings that two passes must order alike; a group below is quarantined.
        max_difference: mean absolute difference between both passes' scores after each pass's own mean is taken off,
            as advantages take it off; a group above is quarantined.
        tie: scores no further apart than this are of equal worth.
        planted_share: of the groups, copied with a known-bad sibling; never fewer than two groups, 0 is off.
        planted_margin: so far above the worst true sibling a planted answer may come out.
        max_planted_misses: share of the planted answers; with more missed, and more than one, the whole batch is
            quarantined.
        flag_cap: highest score of an attempt that itself speaks to the judge; the other siblings' median if lower.
        max_length_correlation: of the ranks of score and length within their groups; an alarm above it.
        max_user_share: of the batch's trajectories that one user may give, where four users or more are known.
        strict: any alarm quarantines the batch.

    Raises:
        ConfigError: a number is out of its range.
    """

    double_share: float = 0.2
    min_agreement: float = 0.6
    max_difference: float = 0.25
    tie: float = 0.05
    planted_share: float = 0.1
    planted_margin: float = 0.2
    max_planted_misses: float = 0.2
    flag_cap: float = 0.5
    max_length_correlation: float = 0.6
    max_user_share: float = 0.5
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no share."""
        for name in self.__slots__:
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a number from 0 to 1")


# --- agreement of two passes ---


def pairwise_agreement(first: Sequence[float], second: Sequence[float], tie: float) -> float:
    """Return the share of pairs that both order alike: a tie in one of them counts half, no pair at all is 1."""
    if len(first) < 2:
        return 1.0

    def order(values: Sequence[float], i: int, j: int) -> int:
        difference = values[i] - values[j]
        return 0 if abs(difference) <= tie + 1e-9 else int(math.copysign(1, difference))

    return fmean(1 - abs(order(first, i, j) - order(second, i, j)) / 2 for i, j in combinations(range(len(first)), 2))


def why_disagreed(first: Sequence[float], second: Sequence[float], config: DefenceConfig) -> str | None:
    """Return why two passes over the same siblings do not agree; `None` if they do."""
    agreement = pairwise_agreement(first, second, config.tie)
    shift = fmean(first) - fmean(second)
    difference = fmean(abs(a - b - shift) for a, b in zip(first, second, strict=True))
    if agreement < config.min_agreement:
        return f"judged in two orders, only {agreement:.0%} of the pairs came out alike"
    if difference > config.max_difference:
        return f"judged in two orders, the scores differ by {difference:.2f} on average"
    return None


# --- flags ---


@dataclass(frozen=True, slots=True)
class Flag:
    """Why an attempt's transcript is suspect, and whether the policy wrote that itself."""

    reason: str
    own: bool


def flags(group: Group) -> dict[str, Flag]:
    """Return the flag of each sibling that has one, by trajectory id; what the policy wrote goes before all else."""
    shared = shared_count(group)
    found: dict[str, Flag] = {}
    for sibling in group.trajectories:
        for index, message in enumerate(transcript(sibling)):
            own = message.get("role") == "assistant" and index >= shared
            if sibling.id in found and not own:
                continue
            reason = next(filter(None, map(suspicion, strings(message))), None)
            if reason:
                found[sibling.id] = Flag(f"message {index + 1} ({message.get('role')}) {reason}", own)
                if own:
                    break
    return found


def caps(values: Mapping[str, float], flagged: Mapping[str, Flag], config: DefenceConfig) -> dict[str, float]:
    """Return the lower score of each sibling that is capped, by trajectory id; none is ever raised."""
    own = {name for name, flag in flagged.items() if flag.own and name in values}
    honest = [value for name, value in values.items() if name not in own]
    cap = min(median_low(honest or values.values()), config.flag_cap) if own else 0.0
    return {name: cap for name in own if values[name] > cap}


# --- length ---


def length_correlation(batch: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float | None:
    """Return Spearman's correlation of scores and lengths, ranked within each group and pooled over the batch.

    Args:
        batch: for each group the siblings' scores and the lengths of what they wrote.

    Returns:
        -1 to 1; `None` where there is too little that differs.
    """
    scores: list[float] = []
    lengths: list[float] = []
    for group_scores, group_lengths in batch:
        if len(set(group_scores)) > 1 and len(set(group_lengths)) > 1:
            scores += _centred_ranks(group_scores)
            lengths += _centred_ranks(group_lengths)
    return correlation(scores, lengths) if len(scores) >= _MIN_RANKED else None


def _centred_ranks(values: Sequence[float]) -> list[float]:
    ranks = [sum(other < value for other in values) + values.count(value) / 2 for value in values]
    return [rank - len(values) / 2 for rank in ranks]


def written_length(group: Group) -> list[int]:
    """Return how many characters each sibling wrote itself, in the group's order."""
    shared = shared_count(group)
    return [
        sum(len(text) for m in transcript(t)[shared:] if m.get("role") == "assistant" for text in strings(m))
        for t in group.trajectories
    ]


# --- users ---


def within_user_share(groups: Sequence[Group], config: DefenceConfig) -> tuple[list[Group], list[Group]]:
    """Return the groups that this batch takes and those that wait: the newest of users who gave more than their share.

    The share is of what is taken, and never less than twice an equal one. Trajectories without a user count as others'.
    """
    kept, left = list(groups), list[Group]()
    users = {t.info.user_id for group in groups for t in group.trajectories if t.info.user_id}
    share = max(config.max_user_share, 2 / max(1, len(users)))
    while len(users) >= _MIN_USERS and len(kept) > 1:
        given = Counter(t.info.user_id for group in kept for t in group.trajectories)
        total = given.total()
        user, count = max(((user, given[user]) for user in sorted(users, key=str)), key=lambda item: item[1])
        if count <= share * total:
            break
        surplus = max(range(len(kept)), key=lambda i: (sum(t.info.user_id == user for t in kept[i].trajectories), i))
        left.append(kept.pop(surplus))
    return kept, left


# --- what messages hold ---


def shared_count(group: Group) -> int:
    """Return how many leading messages all siblings have in common, the last of each left out: that one is its own."""
    runs = [[canonical(message) for message in transcript(sibling)[:-1]] for sibling in group.trajectories]
    count = 0
    for column in zip(*runs, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def strings(value: Any) -> Iterator[str]:
    """Yield every text in a message, names of tools and their arguments included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[str, Any]", value).values():
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("Sequence[Any]", value):
            yield from strings(item)
