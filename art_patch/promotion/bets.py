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

A test that goes on for good looks for a change that may come at any time. A bettor that starts with all its wealth
loses most of it before the change. So the wealth of such a test is spread (`Bets.spread`): it waits, and is staked
little by little. This is a mixture of tests that begin at all these times, and the limit holds for it too. See Shin,
Ramdas and Rinaldo 2022 on e-detectors, https://arxiv.org/abs/2203.03532.
See Waudby-Smith and Ramdas 2024, https://arxiv.org/abs/2010.09686, Howard et al. 2021,
https://arxiv.org/abs/1810.08240, and for experiments Ham et al. 2022, https://arxiv.org/abs/2210.08639.
"""

import math
from heapq import heappop, heappush
from statistics import fmean

from art_patch.promotion.evidence import Observation

# The fractions of the wealth that are bet: twelve, from a small difference's to the largest, in equal steps of the log.
FRACTIONS = tuple(0.004 * (0.95 / 0.004) ** (step / 11) for step in range(12))

# Of a test that goes on for good: six, since each costs a share of the wealth that is little already.
COARSE_FRACTIONS = tuple(0.02 * (0.9 / 0.02) ** (step / 5) for step in range(6))

_GUESS_WEIGHT = 10.0  # the first guess counts as so many sessions

# Share of the wealth that is staked at the begin, where the rest is spread.
_FIRST_STAKE = 0.1
# Weight of a value in the guesses, each time that another one comes: traffic of a test for good drifts.
_FADES = 0.998


class Bets:
    """Two bettors on one signal: one on "better", one on "worse". Values are from 0 to 1, and 1 is good."""

    def __init__(self, first_guess: float, *, margin: float = 0.0, tolerance: float = 0.0) -> None:
        self._margin, self._tolerance = margin, tolerance
        self._sum, self._weight = first_guess * _GUESS_WEIGHT, _GUESS_WEIGHT
        self._joins: list[tuple[float, float]] = []  # a heap of values that do not count in the guesses yet
        self._fractions, self._fades = FRACTIONS, 1.0
        self._better = self._worse = [1 / len(FRACTIONS)] * len(FRACTIONS)
        # Wealth that is not staked yet, how much is staked each second, and when some was staked last.
        self._waits, self._stakes_a_s, self._staked_at = 0.0, 0.0, 0.0
        # The largest wealth so far decides: a proof stands, whatever comes after it.
        self.most_better = self.most_worse = 1.0
        self._z: list[float] = []

    def spread(self, spread_s: float, *, begin: float, is_whole: bool) -> None:
        """Stake the wealth evenly over `spread_s` from `begin` on; a tenth at once if the test `is_whole`, began then.

        To be called before the first session is added. A test of which only the last part is known (not `is_whole`)
        bets on that part as the whole test does, so it alarms at most as often.
        """
        at_once = _FIRST_STAKE if is_whole else 0.0
        self._fractions, self._fades = COARSE_FRACTIONS, _FADES
        self._better = self._worse = [at_once / len(COARSE_FRACTIONS)] * len(COARSE_FRACTIONS)
        self._waits, self._stakes_a_s, self._staked_at = 1 - at_once, (1 - _FIRST_STAKE) / spread_s, begin

    @property
    def sessions(self) -> int:
        """The number of sessions that were bet on."""
        return len(self._z)

    @property
    def worse(self) -> float:
        """The present wealth of the bets on "worse", with what waits."""
        return sum(self._worse) + self._waits

    @property
    def difference(self) -> float:
        """The mean value of the policy under test minus the champion's: unbiased, whatever their shares were."""
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
            self._sum, self._weight = self._sum * self._fades, self._weight * self._fades
            heappush(self._joins, (seen.at if seen.joins is None else seen.joins, value))
            if not 0 < p < 1:
                return  # it could not have been the other policy's, so it compares nothing
            z = (value - guess) / p if seen.challenger else (guess - value) / (1 - p)
            lo, hi = max(guess / p, (1 - guess) / (1 - p)), max((1 - guess) / p, guess / (1 - p))
        self._z.append(z)
        up = (z - self._margin) / (lo + self._margin) if lo + self._margin > 0 else 0.0
        down = (z + self._tolerance) / (hi + self._tolerance)
        if self._waits:
            more = self._stake(seen.at) / len(self._fractions)
            self._better, self._worse = ([wealth + more for wealth in its] for its in (self._better, self._worse))
        self._better = [wealth * (1 + f * up) for wealth, f in zip(self._better, self._fractions, strict=True)]
        self._worse = [wealth * (1 - f * down) for wealth, f in zip(self._worse, self._fractions, strict=True)]
        better, worse = sum(self._better) + self._waits, sum(self._worse) + self._waits
        # A comparison costs less than `max`, and there are millions.
        if better > self.most_better:
            self.most_better = better
        if worse > self.most_worse:
            self.most_worse = worse

    def _stake(self, at: float) -> float:
        """Return the wealth to stake with a session that was known then: it depends on the time alone."""
        stake = min(max(at - self._staked_at, 0.0) * self._stakes_a_s, self._waits)
        self._waits, self._staked_at = self._waits - stake, max(at, self._staked_at)
        return stake
