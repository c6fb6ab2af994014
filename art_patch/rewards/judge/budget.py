"""What judging may cost: asked before every request, told after it. Shared by threads, and by judges if one likes.

A request is allowed if what was spent, what is under way and what it is expected to cost are within the limits. So a
limit on calls is kept exactly. Prices of answers are only known afterwards, hence:

- Until one answer has told what an answer really costs, requests go one at a time.
- From then on a request is expected to cost as much above its estimate as the dearest answer did.

So the money may be overrun by no more than what the last answers cost above the dearest ones before them, which is less
than one call unless prices leap.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from art_patch.errors import ConfigError


class BudgetUsedUp(Exception):
    """The next request is not within the budget. The message says which limit it was."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request that was allowed: its estimate, and what is held for it, in USD."""

    estimate_usd: float
    held_usd: float


class Budget:
    """Limits of what a judge may be asked; `None` is no limit.

    Args:
        max_usd: money for all requests together.
        max_calls: HTTP requests, retries and repair tries included.

    Raises:
        ConfigError: a limit is negative or no number.
    """

    def __init__(self, max_usd: float | None = None, max_calls: int | None = None) -> None:
        for name, limit in (("max_usd", max_usd), ("max_calls", max_calls)):
            if limit is not None and not limit >= 0:
                raise ConfigError(f"{name} is {limit}; give a number of 0 or more, or leave it out for no limit")
        self.max_usd = max_usd
        self.max_calls = max_calls
        self._changed = threading.Condition()
        self._calls = 0
        self._spent_usd = 0.0
        self._held: list[Reservation] = []
        self._dearness: float | None = None
        """Largest price so far by its estimate; `None` until an answer was paid for."""

    @property
    def calls(self) -> int:
        """Requests that were allowed so far."""
        return self._calls

    @property
    def spent_usd(self) -> float:
        """What is known to have been spent, and what a request without a price was expected to cost."""
        return self._spent_usd

    def reserve(self, estimate_usd: float | None) -> Reservation:
        """Allow one request, or wait until it is known whether it can be.

        Args:
            estimate_usd: what it is likely to cost; `None` where the judge's price is unknown.

        Raises:
            BudgetUsedUp: it is not within the limits; or there is a limit on money and no price.
        """
        with self._changed:
            if self.max_calls is not None and self._calls >= self.max_calls:
                raise BudgetUsedUp(f"{self._calls} of {self.max_calls} calls were made")
            held = Reservation(0.0, 0.0) if self.max_usd is None else self._hold(self.max_usd, estimate_usd)
            if self.max_calls is not None and self._calls >= self.max_calls:  # made while we waited
                raise BudgetUsedUp(f"{self._calls} of {self.max_calls} calls were made")
            self._calls += 1
            self._held.append(held)
            return held

    def settle(self, reservation: Reservation, cost_usd: float | None) -> None:
        """Say how a request ended.

        Args:
            reservation: from `reserve`.
            cost_usd: what it cost; 0 if it was refused; `None` if nobody knows, which counts as what was held for it.
        """
        with self._changed:
            self._held.remove(reservation)
            self._spent_usd += reservation.held_usd if cost_usd is None else cost_usd
            if cost_usd and reservation.estimate_usd:
                self._dearness = max(self._dearness or 0.0, cost_usd / reservation.estimate_usd)
            self._changed.notify_all()

    def _hold(self, max_usd: float, estimate_usd: float | None) -> Reservation:
        if estimate_usd is None:
            raise BudgetUsedUp("the judge's price is unknown, so no limit in USD can be kept; limit the calls instead")
        while self._dearness is None and self._held:
            self._changed.wait()
        expected = estimate_usd * max(self._dearness or 1.0, 1.0)
        under_way = sum(reservation.held_usd for reservation in self._held)
        if self._spent_usd + under_way + expected > max_usd:
            raise BudgetUsedUp(
                f"${self._spent_usd:.4g} of ${max_usd:.4g} were spent, ${under_way:.4g} are held for requests under "
                f"way, and the next one is expected to cost ${expected:.4g}"
            )
        return Reservation(estimate_usd, expected)
