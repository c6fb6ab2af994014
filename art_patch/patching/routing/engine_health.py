"""Circuit breaker: an engine that keeps failing is left alone for a while. Pure state machine; time is an argument.

Closed: calls pass; `failures` failures within `window_s` open it. Open: no call passes for `cooldown_s`, then exactly
one does, the probe. If the probe succeeds the breaker closes; if it fails, the cool-down starts again; if nobody ever
says what became of it, another probe may go after `probe_lease_s`.
"""

from __future__ import annotations

import http.client
from collections import deque
from urllib.parse import urlsplit

from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, TooSlow
from art_patch.patching.routing.target import Target


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


TIMEOUT_S = 1.0


def is_alive(base_url: str) -> bool:
    """Whether the engine answers; any answer but a 5xx will do, because not every engine knows `/health`."""
    address = urlsplit(base_url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    connection = kind(address.netloc.rpartition("@")[2], timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{address.path.rstrip('/').removesuffix('/v1')}/health")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


_NOT_THE_ENGINE = frozenset({400, 413, 422})
"""Refusals of this one request; other calls may still go to the engine."""

_UNREADABLE = "the SDK cannot read"


def as_recorded(target: Target, reason: str) -> str:
    """Return the reason as it is recorded: with the challenger's name in front, if that was asked."""
    return f"{target.champion}: {reason}" if target.asks_challenger else reason


def reason(error: Exception) -> str:
    """Return why there is no answer."""
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", None)
    if isinstance(error, TooSlow):
        return "the engine did not answer in time"
    if isinstance(error, InvalidAnswer):
        return f"the engine's answer is invalid: {error}"
    if isinstance(status, int):
        return f"the engine answered HTTP {status}"
    if is_connect_timeout(error):
        return "the engine cannot be reached in time"
    if "Timeout" in type(error).__name__:
        return "the engine did not answer in time"
    if "APIConnectionError" in names or type(error).__module__.startswith(("httpx", "httpcore")):
        return "the engine cannot be reached"
    return f"{_UNREADABLE} the engine's answer ({type(error).__name__})"


def is_connect_timeout(error: Exception) -> bool:
    """Whether there was no connection in time."""
    return type(error.__cause__).__name__ == "ConnectTimeout"


def is_about_the_engine(error: Exception) -> bool:
    """Whether other calls would fare no better."""
    return getattr(error, "status_code", None) not in _NOT_THE_ENGINE and not reason(error).startswith(_UNREADABLE)
