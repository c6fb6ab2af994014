"""Decides whether calls may go to the engine: a circuit breaker, a health check, and the reasons of failed attempts.

The breaker is a state machine; its caller gives it the time and holds a lock. Closed: all calls go to the engine, and
`failures` failures within `window_s` seconds open the breaker. Open: no call goes to the engine for `cooldown_s`; after
that, one call does, as a probe. If the probe succeeds, the breaker closes. If it fails, the cool-down starts again. If
the outcome of the probe is never reported, another call becomes the probe after `probe_lease_s`.
"""

import http.client
from collections import deque
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

from art_patch._lib.loose_json import as_object, as_text
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, TooSlow
from art_patch.types import ENGINE_FULL


class Breaker:
    """Circuit breaker of one engine. While it is not closed, the caller must hold a lock to use it."""

    def __init__(
        self, *, failures: int = 5, window_s: float = 10.0, cooldown_s: float = 30.0, probe_lease_s: float = 60.0
    ) -> None:
        self._window_s, self._cooldown_s, self._probe_lease_s = window_s, cooldown_s, probe_lease_s
        self._failed_at: deque[float] = deque(maxlen=failures)
        # `None` while closed; else the moment (monotonic clock) from which the next probe may pass.
        self._retry_at: float | None = None

    @property
    def closed(self) -> bool:
        """Whether all calls may go to the engine."""
        return self._retry_at is None

    def allow(self, now: float) -> bool:
        """Return whether a call may go to the engine. If the breaker is open, that call becomes the probe."""
        if self._retry_at is None:
            return True
        if now < self._retry_at:
            return False
        # A probe whose caller dies never reports. The lease keeps the breaker from staying open for ever.
        self._retry_at = now + self._probe_lease_s
        return True

    def succeeded(self) -> None:
        """Close the breaker: the engine answered a call."""
        self._failed_at.clear()
        self._retry_at = None

    def failed(self, now: float) -> None:
        """Count a failed call. The breaker opens if that call was the probe, or if there are now too many failures."""
        self._failed_at.append(now)
        are_too_many = len(self._failed_at) == self._failed_at.maxlen and now - self._failed_at[0] <= self._window_s
        if self._retry_at is not None or are_too_many:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open the breaker without a failed call, because the health check failed."""
        self._retry_at = now + self._cooldown_s

    def released(self, now: float) -> None:
        """End a call whose outcome does not show whether the engine works. The next call may become the probe."""
        if self._retry_at is not None:
            self._retry_at = now


# A call that is not streamed has no first token: a hanging engine would collect callers until their long timeout. So
# the recorder's thread checks the engine's health when a caller has waited for longer than a first token may take.
TIMEOUT_S = 1.0


def is_alive(base_url: str) -> bool:
    """Return whether the engine answers `/health` within a second with a status below 500: some answer 404."""
    address = urlsplit(base_url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    # `http.client` takes no proxy from the environment and follows no redirect.
    connection = kind(address.netloc.rpartition("@")[2], timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{address.path.rstrip('/').removesuffix('/v1')}/health")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


# The engine has no room for a request now.
_FULL = 429

# The engine refused this one request. It may accept others.
_NOT_THE_ENGINE = frozenset({400, 413, 422, _FULL})

_UNREADABLE = "the SDK cannot read"


def reason(error: Exception) -> str:
    """Return why an attempt failed; if the engine refused it, with the engine's own words."""
    if isinstance(error.__cause__, InvalidAnswer):  # raised while the SDK received the answer
        error = error.__cause__
    # By name, because the classes are those of httpx or httpx2, and importing either is the SDK's decision.
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", None)
    if isinstance(error, InvalidAnswer) and not isinstance(error, TooSlow):
        return f"the engine's answer is invalid: {error}"
    if status == _FULL:
        return ENGINE_FULL
    if isinstance(status, int):
        return f"the engine answered HTTP {status}{_words(error)}"
    if is_connect_timeout(error):
        return "the engine cannot be reached in time"
    if isinstance(error, TooSlow) or "Timeout" in type(error).__name__:
        return "the engine did not answer in time"
    if "APIConnectionError" in names or type(error).__module__.startswith(("httpx", "httpcore")):
        return "the engine cannot be reached"
    return f"{_UNREADABLE} the engine's answer ({type(error).__name__})"


def room_in_s(error: Exception) -> float | None:
    """Return after how many seconds the engine may have room again; `None` unless it refused a request for lack of it.

    No engine is left alone for longer than five seconds, because each call costs it little to refuse.
    """
    if getattr(error, "status_code", None) != _FULL:
        return None
    headers: Any = cast(Any, error).response.headers
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):  # the header is missing, or it names a date
            return min(max(float(headers[name]) * unit_s, 0.0), 5.0)
    return 1.0


def _words(error: Exception) -> str:
    # The record is scrubbed and cut when it is made; here only what would be costly or reach a terminal is left out.
    words = as_text(as_object(getattr(error, "body", None)).get("message"))[:8000].strip()
    return ": " + "".join(char if char.isprintable() else " " for char in words) if words else ""


def is_connect_timeout(error: Exception) -> bool:
    """Return whether an error means that connecting to the engine took longer than its timeout."""
    # The SDK raises one `APITimeoutError` for both kinds of timeouts; only its cause tells them apart.
    return type(error.__cause__).__name__ == "ConnectTimeout"


def is_about_the_engine(error: Exception) -> bool:
    """Return whether an error counts as a failure of the engine, because other calls would fail as well."""
    return getattr(error, "status_code", None) not in _NOT_THE_ENGINE and not reason(error).startswith(_UNREADABLE)
