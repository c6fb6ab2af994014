"""The bets of the canary test on the difference between two policies, from sessions in order of time. Pure.

A session goes to the canary with a probability p that is known before it begins. It has one value Y from 0 to
1, and m is a guess of it that was made before. With Z = (Y - m) / p for a session of the canary and -(Y - m) / (1 - p)
for one of the champion, the expectation of Z is the difference between the policies in this session, whatever m is,
however traffic drifts and whoever the users are: only the assignment is random. A bettor starts with wealth 1 and bets
a fraction f of it on each Z, so that the wealth is never negative: on "better" `1 + f (Z - margin) / (lo + margin)`, on
"worse" `1 - f (Z + tolerance) / (hi + tolerance)`, where Z lies between -lo and hi. Under the null hypothesis the
expected wealth does not grow, so by Ville's inequality it ever reaches 1 / alpha with a probability of at most alpha,
however often somebody looks. The wealth is split among `FRACTIONS` equally: a large fraction finds a large difference
within few sessions, a small one finds a small difference later. So a policy that fails at once needs no other rule.
See Waudby-Smith and Ramdas 2024, https://arxiv.org/abs/2010.09686, Howard et al. 2021,
https://arxiv.org/abs/1810.08240, and for experiments Ham et al. 2022, https://arxiv.org/abs/2210.08639.
"""

import math
from heapq import heappop, heappush
from statistics import fmean

from art_patch.promotion.evidence import Observation

# The fractions of the wealth that are bet: twelve, from a small difference's to the largest, in equal steps of the log.
FRACTIONS = tuple(0.004 * (0.95 / 0.004) ** (step / 11) for step in range(12))

_GUESS_WEIGHT = 10.0  # the first guess counts as so many sessions


class Bets:
    """Two bettors on one signal: one on "better", one on "worse". Values are from 0 to 1, and 1 is good."""

    def __init__(self, first_guess: float, *, margin: float = 0.0, tolerance: float = 0.0) -> None:
        self._margin, self._tolerance = margin, tolerance
        self._sum, self._weight = first_guess * _GUESS_WEIGHT, _GUESS_WEIGHT
        self._joins: list[tuple[float, float]] = []  # a heap of values that do not count in the guesses yet
        self._better = self._worse = [1 / len(FRACTIONS)] * len(FRACTIONS)
        # The largest wealth so far decides: a proof stands, whatever comes after it.
        self.most_better = self.most_worse = 1.0
        self._z: list[float] = []

    @property
    def sessions(self) -> int:
        """The number of sessions that were bet on."""
        return len(self._z)

    @property
    def worse(self) -> float:
        """The present wealth of the bets on "worse"."""
        return sum(self._worse)

    @property
    def difference(self) -> float:
        """The mean difference between the policies so far: unbiased, whatever the shares were."""
        return fmean(self._z) if self._z else 0.0

    @property
    def error(self) -> float:
        """The standard error of `difference`, for forecasts; no decision rests on it."""
        mean, n = self.difference, len(self._z)
        return math.sqrt(sum((z - mean) ** 2 for z in self._z) / (n * (n - 1))) if n > 1 else math.inf

    def sessions_needed(self, alpha: float, difference: float) -> float:
        """How many sessions such a difference takes to be proven, of which the present number is a part."""
        n = len(self._z)
        variance = self.error**2 * n if n > 1 else math.inf
        # The best fraction's wealth grows by about difference**2 / (2 * variance) a session, in logs.
        return 2 * variance * math.log(len(FRACTIONS) / alpha) / difference**2 if difference else math.inf

    def add(self, seen: Observation, value: float, champions: float | None = None) -> None:
        """Bet on one session. `champions` is the champion's value of the same session, if both policies answered it."""
        if champions is not None:
            z, lo, hi = value - champions, 1.0, 1.0
        else:
            while self._joins and self._joins[0][0] <= seen.at:
                self._sum, self._weight = self._sum + heappop(self._joins)[1], self._weight + 1
            guess, p = self._sum / self._weight if seen.guess is None else seen.guess, seen.share
            heappush(self._joins, (seen.at if seen.joins is None else seen.joins, value))
            if not 0 < p < 1:
                return  # it could not have been the other policy's, so it compares nothing
            z = (value - guess) / p if seen.challenger else (guess - value) / (1 - p)
            lo, hi = max(guess / p, (1 - guess) / (1 - p)), max((1 - guess) / p, guess / (1 - p))
        self._z.append(z)
        up = (z - self._margin) / (lo + self._margin) if lo + self._margin > 0 else 0.0
        down = (z + self._tolerance) / (hi + self._tolerance)
        self._better = [wealth * (1 + f * up) for wealth, f in zip(self._better, FRACTIONS, strict=True)]
        self._worse = [wealth * (1 - f * down) for wealth, f in zip(self._worse, FRACTIONS, strict=True)]
        self.most_better = max(self.most_better, sum(self._better))
        self.most_worse = max(self.most_worse, sum(self._worse))
