"""Circuit breaker: an engine that keeps failing is left alone for a while. Pure state machine; time is an argument.

Closed: calls pass; `failures` failures within `window_s` open it. Open: no call passes for `cooldown_s`, then exactly
one does, the probe. If the probe succeeds the breaker closes; if it fails, the cool-down starts again; if nobody ever
says what became of it, another probe may go after `probe_lease_s`.
"""

from __future__ import annotations

from collections import deque


class Breaker:
    """State of one engine. Not locked; the caller serialises calls while it is not closed."""

    def __init__(
        self, *, failures: int = 5, window_s: float = 10.0, cooldown_s: float = 30.0, probe_lease_s: float = 60.0
    ) -> None:
        """Start closed."""
        self._limit = failures
        self._window_s = window_s
        self._cooldown_s = cooldown_s
        self._probe_lease_s = probe_lease_s
        self._failed_at: deque[float] = deque(maxlen=failures)
        self._retry_at: float | None = None

    @property
    def closed(self) -> bool:
        """Whether calls pass."""
        return self._retry_at is None

    def allow(self, now: float) -> bool:
        """Whether a call may go to the engine; in the open state a yes makes that call the probe."""
        if self._retry_at is None:
            return True
        if now < self._retry_at:
            return False
        self._retry_at = now + self._probe_lease_s
        return True

    def succeeded(self) -> None:
        """A call was answered."""
        self._failed_at.clear()
        self._retry_at = None

    def failed(self, now: float) -> None:
        """A call failed because of the engine."""
        self._failed_at.append(now)
        probing = self._retry_at is not None
        if probing or (len(self._failed_at) == self._limit and now - self._failed_at[0] <= self._window_s):
            self._retry_at = now + self._cooldown_s

    def trip(self, now: float) -> None:
        """It is known without a call that calls would fail."""
        self._retry_at = now + self._cooldown_s

    def released(self, now: float) -> None:
        """A call that was let through ended without saying anything about the engine."""
        if self._retry_at is not None:
            self._retry_at = now
