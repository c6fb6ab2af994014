"""Is the challenger worse, or better, than the champion? An answer that may be asked for after every observation.

In: what was observed of both arms, in order. Out: whether the difference of their means is proven to lie above a
number, and bounds of it. Values are from 0 to 1, differences from -1 to 1; nothing else is assumed of how they spread.

**Blocks.** What comes is cut into blocks, each as short as possible with at least one value of both arms, and each
block gives one difference. Where a block ends depends on who was asked, never on a value, so the mean of each
difference is the difference of the arms, whatever share of the sessions each gets. Both sides of a block are of the
same time: an afternoon on which all tasks are hard, or a minute in which the engine is down, weighs on both.

**Bets.** Whoever doubts that the mean of the differences D is at most m starts with 1 and bets before each block a
fixed part g of what the worst block could cost: the capital is multiplied by `1 + g (D - m) / (1 + m)`. If the mean is
at most m the capital is not expected to grow, so by Ville's inequality it ever reaches 1 / alpha with a chance of at
most alpha, over all looks together, infinitely many included. Capitals of several g are averaged, which keeps this
true: a large g finds a large difference within a few blocks, a small g finds a small one later (Waudby-Smith & Ramdas
2024, https://arxiv.org/abs/2010.09686; Howard et al. 2021, https://arxiv.org/abs/1810.08240). The capital falls as m
grows, so a bound is found by halving. Left out: bets that adapt to the variance seen.

What is asked of the data: values in the order in which they became known, so a score that came late stands where it
came, and a share that stays the same within a block. From block to block it may change, for whatever reason: the next
share is chosen before the next block begins, and whatever it is, that block's mean is the difference of the arms. So a
test goes on over a change, with the capital that it has; starting anew instead would give a bad challenger `alpha`
once more each time. O(n) a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

BETS = (0.05, 0.15, 0.35, 0.6, 0.9)
"""Parts g of the largest possible bet; equal shares of the capital are bet each way."""

_HALVINGS = 9  # a bound is exact to 2 / 2 ** 9 = 0.004


class Observation(NamedTuple):
    """One value of one arm.

    Attributes:
        at: when it became known, seconds since the epoch.
        challenger: whether it is the challenger's; else the champion's.
        value: from 0 to 1, or a time for `slower`.
    """

    at: float
    challenger: bool
    value: float


class Block(NamedTuple):
    """Values of both arms that are compared with each other; at least one each.

    Attributes:
        at: when the last of them became known.
        challenger: its values.
        champion: its values.
    """

    at: float
    challenger: tuple[float, ...]
    champion: tuple[float, ...]


def blocks(observations: Iterable[Observation]) -> list[Block]:
    """Cut what was observed into the shortest blocks that hold both arms; what is left over at the end waits."""
    found: list[Block] = []
    ours: list[float] = []
    theirs: list[float] = []
    for each in sorted(observations, key=lambda one: one.at):
        (ours if each.challenger else theirs).append(each.value)
        if ours and theirs:
            found.append(Block(each.at, tuple(ours), tuple(theirs)))
            ours, theirs = [], []
    return found


def difference(block: Block) -> float:
    """Return the challenger's mean less the champion's, of values from 0 to 1."""
    return sum(block.challenger) / len(block.challenger) - sum(block.champion) / len(block.champion)


def slower(block: Block, ratio: float) -> float:
    """Return 1 where the challenger's median time is above `ratio` times the champion's, -1 where below, 0 else.

    With a ratio above 1, blocks of two equally fast arms are below more often than above, whatever the times' scale and
    however long their tail.
    """
    ours, theirs = median(block.challenger), ratio * median(block.champion)
    return float((ours > theirs) - (ours < theirs))


def is_above(differences: Sequence[float], null: float, alpha: float) -> bool:
    """Whether it is, or was at any earlier point, proven that the mean difference is above `null`.

    Args:
        differences: from -1 to 1, in order.
        null: the mean that is doubted, above -1.
        alpha: chance to say so of a mean that is not, over all looks together.
    """
    enough = len(BETS) / alpha
    capitals = [1.0] * len(BETS)
    parts = [part / (1 + null) for part in BETS]
    for value in differences:
        gain = value - null
        capitals = [capital * (1 + part * gain) for capital, part in zip(capitals, parts, strict=True)]
        if sum(capitals) >= enough:
            return True
    return False


def lower_bound(differences: Sequence[float], alpha: float) -> float:
    """Return what the mean difference is proven to lie above; -1 without data."""
    low, high = -1.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if is_above(differences, middle, alpha):
            low = middle
        else:
            high = middle
    return low


def upper_bound(differences: Sequence[float], alpha: float) -> float:
    """Return what the mean difference is proven to lie below; 1 without data."""
    return -lower_bound([-value for value in differences], alpha)
