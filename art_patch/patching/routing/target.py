"""Computes where calls may go (the target), chooses the policy that answers a run, and tells if the engine works.

A run is identified by its trajectory if the app names one; if not, by the opening messages of the conversation. All
calls of a run go to the policy of its first call for as long as the engine serves that policy, which is for two more
promotions: the run is pinned to it. While a canary is tested, a hash of session and canary assigns a share of new runs
to the canary; a session leaves it at its second failed call. Pins and failures are kept in this process only: for a run
that continues in another process, the hash decides again.

The circuit breaker is a state machine; its caller gives it the time and holds a lock. Closed: all calls go to the
engine, and `failures` failures within `window_s` seconds open the breaker. Open: no call goes to the engine for
`cooldown_s`; after that, one call does, as a probe. If the probe succeeds, the breaker closes. If it fails, the
cool-down starts again. If the outcome of the probe is never reported, another call becomes the probe after
`probe_lease_s`.
"""

import http.client
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from art_patch._lib.events import event
from art_patch._lib.loose_json import as_object, as_text
from art_patch.context import Identity
from art_patch.errors import ConfigError
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, TooSlow
from art_patch.recording import in_share
from art_patch.settings import Settings
from art_patch.types import ENGINE_FULL, REFUSED, UNREACHABLE, Mode, Route

_ASKING = frozenset({"route", "canary", "shadow"})

# Sent to an engine that needs no key, because the SDK cannot send none.
NO_KEY = "none"


# Not a tuple, although making one is faster: error reporters show the items of tuples, which would reveal the key.
@dataclass(frozen=True, slots=True)
class Target:
    """The engine, policies and mode for calls; immutable, so that a call uses the same values from start to end."""

    mode: Mode  # the current mode: that of the store, or the app's own if the store has none
    champion: str | None  # `None`: upstream is the champion, and answers what no canary does
    base_url: str | None
    api_key: str = field(default=NO_KEY, repr=False)
    timeout_s: float = 30.0
    first_token_timeout_s: float = 2.0
    connect_timeout_s: float = 0.25
    canary_percent: float = 0.0  # percentage of sessions that the champion answers in mode `canary`
    # When the engine wrote its address to the store; it tells two engines at the same address apart.
    engine_since: float | None = None
    # Name of the policy under test (canary or shadow), on the same engine; without one, of the learner, as a shadow.
    challenger: str | None = None
    challenger_state: Literal["shadow", "canary"] | None = None
    challenger_percent: float = 0.0  # percentage of the sessions answered by policies that go to the canary
    control_percent: float = 0.0  # percentage of the routed sessions that upstream answers
    # Why no policy can be asked although the mode is `route`; the records of such calls hold it.
    unknown: str | None = None

    @property
    def serves(self) -> bool:
        """Whether a policy can be asked: for the app's answers, or in the background."""
        asked = self.champion is not None or self.challenger is not None
        return asked and self.mode in _ASKING and self.base_url is not None

    @property
    def routes(self) -> bool:
        """Whether the answers of the champion, or of a canary, are given to the app."""
        return self.mode != "shadow" and self.serves and (self.champion is not None or self.canary is not None)

    @property
    def canary(self) -> str | None:
        """Name of the policy under test if it answers a share of the sessions; else `None`."""
        return self.challenger if self.challenger_state == "canary" else None

    @property
    def asks_challenger(self) -> bool:
        """Whether a call with this target goes to the canary: `RoutedCall` makes a copy with the canary as champion."""
        return self.challenger is not None and self.champion == self.challenger

    def failed(self, reason: str) -> str:
        """Return why an attempt failed, for the call's record; for the policy under test after `NAME@STEP: `."""
        return f"{self.champion}: {reason}" if self.asks_challenger else reason


def resolve(settings: Settings, route: Route) -> tuple[Target, ConfigError | None]:
    """Return the target, and the error if the engine must not be called; that target then asks no policy."""
    key = refused = None
    challenger = route.challenger or (route.learner if route.champion is None else None)
    try:
        if route.champion is not None or challenger is not None:
            key = settings.engine_key(route.base_url, route.key_file)
    except ConfigError as error:
        refused = error
    # The store wins over the app's settings, so that a rollback needs no new deployment.
    mode = route.mode or settings.mode
    target = Target(
        mode=mode,
        champion=route.champion,
        # The app's own address wins: it may reach the engine by another name than the job does.
        base_url=None if refused else settings.base_url or route.base_url,
        api_key=key or NO_KEY,
        timeout_s=settings.timeout_s,
        first_token_timeout_s=settings.first_token_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
        canary_percent=settings.canary_percent if route.canary_percent is None else route.canary_percent,
        engine_since=route.engine_since,
        challenger=challenger,
        challenger_state=route.challenger_state if route.challenger or not challenger else "shadow",
        challenger_percent=route.challenger_percent or 0.0,
        control_percent=route.control_percent,
        # Where upstream is the champion, its answer needs no reason.
        unknown=REFUSED if refused and mode == "route" and route.champion is not None else None,
    )
    return target, refused


# More pins than these are not kept.
_KEPT = 10_000

# So many calls of a session may the canary fail.
_MOST_FAILURES = 2

Key = str | int


class CallKeys:
    """What tells a call's run of the agent, and its session, from others. Made when asked for, and once for a call."""

    __slots__ = ("_body", "_opening", "_run")

    def __init__(self, identity: Identity, body: Mapping[str, Any]) -> None:
        self._run, self._body = identity.trajectory, body
        self._opening: tuple[str, bool] | None = None

    @property
    def session(self) -> str:
        """What is hashed for a share of the traffic: session id, else trajectory id, else the opening messages."""
        run = self._run
        return self._opened()[0] if run is None else run.session_id or run.id

    @property
    def run(self) -> tuple[Key, bool]:
        """The key of the run, and whether the call begins it: trajectory id, else a hash of the opening messages."""
        if self._run is not None:
            return self._run.id, False
        # A conversation without an answer in it begins a new run, even if the same words began a run before.
        opening, begins = self._opened()
        return hash(opening), begins

    def _opened(self) -> tuple[str, bool]:
        if self._opening is None:
            self._opening = _opening_of(self._body)
        return self._opening


class Pins:
    """Remembers which policy answers which run. When there are too many pins, the oldest ones are dropped."""

    def __init__(self) -> None:
        self._pins: dict[Key, str] = {}
        self._left: set[str | None] = set()
        # Sessions whose calls the canary failed, and how often.
        self._failed: dict[str, int] = {}

    def policy(self, call: CallKeys, target: Target) -> tuple[str, Key]:
        """Return the policy to ask (empty: upstream), and the run's key for `forget`."""
        key, begins = call.run
        pinned = None if begins else self._pins.get(key)
        if self._failed and target.canary is not None and self._has_left(call):
            target, pinned = replace(target, challenger=None), None if pinned == target.canary else pinned
        # A trajectory that two policies wrote teaches less than one of a single policy.
        if pinned is not None and self._may_stay(pinned, target):
            return pinned, key
        chosen = _choose(call, target)
        if pinned != chosen:
            if len(self._pins) >= _KEPT:
                # The oldest tenth at once, because building the list takes as long as the dict is large.
                for oldest in list(self._pins)[: _KEPT // 10]:
                    self._pins.pop(oldest, None)
            self._pins[key] = chosen
        return chosen, key

    def turned(self, before: Target, after: Target) -> None:
        """Note a new route, so that pinned runs leave a rejected canary and a champion that was rolled back."""
        # Noted here and not per call: a later champion may have a higher step than both, which hides the rollback.
        if before.canary != after.canary:
            self._failed.clear()
        left = {before.canary, before.champion}
        if _is_surpassed(before.champion or "", after.champion or ""):
            left.discard(before.champion)
        # A policy that serves again was promoted again, so its runs may stay.
        self._left = (self._left | left) - {after.champion, after.canary, None}

    def forget(self, key: Key) -> None:
        """Remove the run's pin, because the engine no longer serves its policy; its next call chooses a policy anew."""
        self._pins.pop(key, None)

    def canary_failed(self, session: str) -> None:
        """Note that the canary failed a call; at the second one, its session leaves the canary."""
        if session in self._failed or len(self._failed) < _KEPT:
            self._failed[session] = self._failed.get(session, 0) + 1

    def _has_left(self, call: CallKeys) -> bool:
        return self._failed.get(call.session, 0) >= _MOST_FAILURES

    def _may_stay(self, pinned: str, target: Target) -> bool:
        if not pinned:  # with upstream, for as long as it is the champion
            return target.champion is None
        serves = pinned in (target.champion, target.canary)
        return serves or (pinned not in self._left and _is_surpassed(pinned, target.champion or ""))


def _choose(call: CallKeys, target: Target) -> str:
    """Return the champion, or the canary for its share of the sessions; empty if upstream is the champion."""
    canary = target.canary
    if canary is not None and in_share(f"{canary}:{call.session}", target.challenger_percent / 100, "challenger"):
        return canary
    return target.champion or ""


def _is_surpassed(pinned: str, champion: str) -> bool:
    """Return whether `champion` came after `pinned`. A champion with a lower step means a rollback."""
    name, _, step = pinned.rpartition("@")
    its_name, _, its_step = champion.rpartition("@")
    return name == its_name and step.isdigit() and its_step.isdigit() and int(step) < int(its_step)


def _opening_of(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Return what an agent sends again with each call of a run, and whether that is all: no answer follows it."""
    said: Any = body.get("messages") or body.get("input") or body.get("prompt")
    instructions = body.get("instructions")
    opening = ["" if instructions is None else _gist(instructions)]
    for message in cast("list[Any]", said) if isinstance(said, list) else [said]:
        if isinstance(message, (dict, Mapping)):  # a dictionary is told at once; the abstract class is slow to ask
            fields = cast("Mapping[str, Any]", message)
            if fields.get("role") not in _BEFORE_THE_ANSWER:
                return "\n".join(opening), False
            opening.append(_gist(fields.get("content")))
        else:
            opening.append(_gist(message))
    return "\n".join(opening), True


_BEFORE_THE_ANSWER = ("system", "developer", "user")

_END_CHARS = 256


def _gist(content: Any) -> str:
    """Return the length and the end of a message, so that a long system prompt or a picture costs the app no time."""
    if isinstance(content, str):
        return f"{len(content)}:{content[-_END_CHARS:]}"
    if isinstance(content, Mapping):
        return f"{{{','.join(map(_gist, cast('Mapping[str, Any]', content).values()))}}}"
    if isinstance(content, list | tuple):
        return f"[{','.join(map(_gist, cast('list[Any]', content)))}]"
    return repr(content)[:_END_CHARS]


class Breaker:
    """Circuit breaker of one engine. While it is not closed, the caller must hold a lock to use it."""

    def __init__(
        self, *, failures: int = 5, window_s: float = 10.0, cooldown_s: float = 30.0, probe_lease_s: float = 60.0,
        of: str = "engine",
    ) -> None:  # fmt: skip
        self._of = of
        self._window_s, self._cooldown_s, self._probe_lease_s = window_s, cooldown_s, probe_lease_s
        self._failed_at: deque[float] = deque(maxlen=failures)
        # `None` while closed; else the moment (monotonic clock) from which the next probe may pass.
        self._retry_at: float | None = None
        self.open_since = 0.0  # when it last opened, in seconds since the epoch

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
        if self._retry_at is not None:
            event("breaker", "the %s answers again; it gets calls", self._of, event="breaker closed", of=self._of)
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
        if self._retry_at is None:
            words = "the %s fails; calls go upstream, and one tries it again in %g s"
            event("breaker", words, self._of, self._cooldown_s, level=WARNING, event="breaker opened", of=self._of)
            self.open_since = time.time()
        self._retry_at = now + self._cooldown_s

    def released(self, now: float) -> None:
        """End a call whose outcome does not show whether the engine works. The next call may become the probe."""
        if self._retry_at is not None:
            self._retry_at = now


# A call that is not streamed has no first token: a hanging engine would collect callers until their long timeout. So
# the recorder's thread checks the engine's health when a caller has waited for longer than a first token may take.
TIMEOUT_S = 1.0


def is_alive(base_url: str) -> bool:
    """Return whether the engine answers `/health` within seconds with a status below 500: some answer 404."""
    address = urlsplit(base_url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    # `http.client` takes no proxy from the environment and follows no redirect.
    connection = kind(address.netloc.rpartition("@")[2], timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{address.path.rstrip('/').removesuffix('/v1')}/health")
        # Not read as an answer: an engine that drips its headers would keep the recorder's thread from writing.
        begins = connection.sock.recv(64)
        return begins.startswith(b"HTTP/") and begins[9:10] in (b"2", b"3", b"4")
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
        return f"{UNREACHABLE} in time"
    if isinstance(error, TooSlow) or "Timeout" in type(error).__name__:
        return "the engine did not answer in time"
    if "APIConnectionError" in names or type(error).__module__.startswith(("httpx", "httpcore")):
        return UNREACHABLE
    return f"{_UNREADABLE} the engine's answer ({type(error).__name__})"


def room_in_s(error: Exception) -> float | None:
    """Return in how many seconds, at most five, a full engine may have room; `None` unless it refused for that."""
    if getattr(error, "status_code", None) != _FULL:
        return None
    headers: Any = cast("Any", error).response.headers
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):  # the header is missing, or it names a date
            return min(max(0.0, float(headers[name]) * unit_s), 5.0)  # in this order, of NaN the 0.0 is left
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
