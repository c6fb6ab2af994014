"""Controls one call of the app from start to end: asks the champion, then upstream if it fails, and records the call.

While a canary is tested, calls of a share of the sessions go to the canary in place of the champion; if the canary
fails, the call goes upstream, not to the champion. Only if the engine answers 404 because the route has just changed,
the call asks the policy that the new route names. Faults of art_patch never leave this module, except under pytest.
`InvalidAnswer` does, on purpose: the wrapper then reports that the attempt failed, and the call goes upstream.
"""

import json
import time
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from art_patch._lib.faults import faults, is_fault
from art_patch.context import Identity, identify
from art_patch.patching.rewriting.engine_request import patience_s
from art_patch.patching.rewriting.response_rewriter import EmptyAnswer, InvalidAnswer, ResponseRewriter, StreamRewriter
from art_patch.patching.routing import target as routing
from art_patch.patching.runtime import Runtime
from art_patch.patching.sdk.stream_tap import StreamTap, install
from art_patch.patching.sdk.surfaces import Chat, surface_of
from art_patch.recording import Exchange, Purpose, in_share, note_call
from art_patch.types import ENGINE_FULL, LEFT_ALONE, REPLAY_OF, UNREACHABLE

# The call that is inside `request` now. `_process_response`, which the SDK calls further down, finds it here.
PENDING: ContextVar["RoutedCall | None"] = ContextVar("art_patch_routed_call", default=None)

# The second attempt asks the policy that has just replaced the first one's, or repeats the first; see `_stood_still`.
_MAX_ATTEMPTS = 2


class Attempt(NamedTuple):
    """One request to the engine. `target.champion` is the asked policy, even if that is a canary or a pinned one."""

    target: routing.Target
    engine_client: Any
    options: Any


class RoutedCall:
    """One call of the app, its attempts to get an answer from the engine, and its record."""

    # fmt: off
    __slots__ = (
        "_asks_again", "_attempt_began", "_attempts", "_claimed", "_identity", "_keys", "_run", "attempt", "client",
        "exchange", "is_async", "options", "routed", "runtime", "stream", "surface", "takes_empty",
    )
    # fmt: on

    def __init__(
        self, runtime: Runtime, surface: Chat, client: Any, options: Any, stream: bool, is_async: bool, who: Identity
    ) -> None:
        self.runtime, self.surface, self.client, self.options = runtime, surface, client, options
        self.stream, self.is_async, self._identity = stream, is_async, who
        self.attempt: Attempt | None = None
        self._attempts, self._attempt_began = 0, 0.0
        self._claimed = self._asks_again = self.takes_empty = self.routed = False
        self._keys = routing.CallKeys(who, options.json_data)
        self._run: routing.Key | None = None
        model = options.json_data.get("model")
        name = model if isinstance(model, str) else ""
        self.exchange = Exchange(runtime.recorder, name, who.trajectory, who.span_id, who.group_key)
        self.exchange.api, self.exchange.server, self.exchange.learn = surface.api, client.base_url, who.learn
        note_call(runtime.settings.project, who.trajectory, who.span_id)
        if runtime.settings.otel == "auto":
            self.exchange.otel_context = who.otel_context
        target = runtime.target
        # A target that is unknown routes nothing, but calls that it would have routed are recorded with the reason.
        serves = target.serves
        if serves or target.unknown is not None:
            if (why := surface.why_not_routed(options, stream, runtime.settings)) is None:
                self.routed, self.exchange.fallback = serves, target.unknown
            else:
                runtime.count_not_routed(f"{surface.api}: {why:.100}")
        if self.routed and (
            target.mode != "route"
            or target.challenger_state == "shadow"
            or target.champion is None
            or target.control_percent > 0
        ):
            self._choose(target)

    def _choose(self, target: routing.Target) -> None:
        """Decide whether a policy or upstream answers the call's session, and who is asked in the background."""
        if target.mode == "shadow" or target.challenger_state == "shadow":
            self.exchange.shadow = self._is_in(self.runtime.settings.shadow_rate, "shadow")
        if target.mode == "shadow":
            self.routed = False
        elif target.mode == "canary":
            self.routed = self._is_in(target.canary_percent / 100, "canary")
        if target.champion is not None:
            is_in = self.routed and self._is_in(target.control_percent / 100, "control")
        else:
            # Upstream is the champion. Beside a canary its sessions are what the canary is compared with. Without one,
            # its runs are pinned too, so that they stay with it when a test begins.
            chosen = self.runtime.pins.policy(self._keys, target)[0] if self.routed else ""
            is_in, self.routed = self.routed and target.canary is not None and not chosen, bool(chosen)
        # A run that the job repeats is no user's session, and an app that asks the engine itself has no upstream.
        if is_in and not _is_replay(self._identity) and not self.runtime.engine_clients.is_engine(self.client, target):
            # No shadow is asked, because its copies are compared with the champion's answers.
            self.routed = self.exchange.shadow = False
            self.exchange.in_control_group = True

    def _is_in(self, share: float, purpose: Purpose) -> bool:
        # Where all sessions are in, or none is, no key is made.
        return in_share(self._keys.session if 0 < share < 1 else "", share, purpose)

    def next_attempt(self) -> Attempt | None:
        """Return the next attempt to ask a policy; `None` if the call goes upstream now."""
        try:
            if self._attempts < _MAX_ATTEMPTS:
                self.attempt = self._make_attempt(self.runtime.target)
        except Exception as error:
            self.routed = False
            faults.fault("patching.route", error)
        return self.attempt

    def last_attempt(self, error: Exception) -> Attempt | None:
        """Return one more attempt, which accepts an empty answer and waits, after upstream failed too."""
        if not self._asks_again or is_fault(error):
            return None
        try:
            self._asks_again, self._claimed, self.takes_empty = False, False, True
            self.exchange.forget_answer()
            target = self.runtime.target
            self.attempt = self._make_attempt(replace(target, first_token_timeout_s=target.timeout_s))
        except Exception as fault:
            faults.fault("patching.route", fault)
        return self.attempt

    def _make_attempt(self, target: routing.Target) -> Attempt | None:
        engine_client = self.runtime.engine_clients.get(self.client, target, self.is_async) if target.routes else None
        if engine_client is None:
            return None  # no policy serves any more, or the app talks to the engine itself, for example to judge
        # The policy that this run of the agent began with.
        asked, self._run = self.runtime.pins.policy(self._keys, target)
        if not asked:  # the canary's test has just ended, or the session leaves it with this call
            return None
        if asked != target.champion:
            target = replace(target, champion=asked)
        if self._attempts:
            # The first attempt may have failed because the app's event loop was busy while it connected.
            target = replace(target, connect_timeout_s=target.first_token_timeout_s)
        if not self.takes_empty and not self.runtime.has_room():
            self.exchange.fallback, self._asks_again = target.failed(ENGINE_FULL), True
            return None
        if not self.runtime.allows(challenger=target.asks_challenger):
            self.exchange.fallback = target.failed(LEFT_ALONE)
            return None
        self._attempts += 1
        self._attempt_began = time.monotonic()
        attempt = Attempt(target, engine_client, self.surface.to_engine_request(self.options, target, self.client))
        self.runtime.began(self)
        self.exchange.policy, self.exchange.server = target.champion, target.base_url
        return attempt

    def attempt_failed(self, error: Exception) -> None:
        """Note why the attempt failed, and decide whether the engine is asked once more or the call goes upstream."""
        if is_fault(error):
            raise error
        try:
            attempt, self.attempt = self.attempt, None
            self._claimed = False  # the next attempt, or upstream, brings another response
            if (pause_s := routing.room_in_s(error)) is not None:
                self.runtime.engine_full(pause_s)
            self._asks_again = isinstance(error, EmptyAnswer) or pause_s is not None
            self.runtime.ended(self)
            self.exchange.forget_answer()
            self.exchange.server = self.client.base_url
            challenger = attempt is not None and attempt.target.asks_challenger
            why = routing.reason(error)
            self.exchange.fallback = why if attempt is None else attempt.target.failed(why)
            if challenger and pause_s is None and not why.startswith(UNREACHABLE):
                self.runtime.pins.canary_failed(self._keys.session)
            is_404 = getattr(error, "status_code", None) == 404
            # The engine no longer serves the policy that this run is pinned to.
            if is_404 and self._run is not None:
                self.runtime.pins.forget(self._run)
            stood_still = attempt is not None and self._stood_still(error, attempt.target)
            if attempt is not None and self._attempts < _MAX_ATTEMPTS:
                # The champion may have been replaced within the last second, so the store is read again.
                self.routed = stood_still or (is_404 and self._is_gone(attempt.target.champion))
            else:
                self.routed = False
            if self.routed or stood_still or not routing.is_about_the_engine(error):
                self.runtime.engine_released(challenger=challenger)
                # Perhaps the engine is gone nevertheless. The recorder's thread can tell, which no loop holds up.
                self.runtime.in_doubt |= stood_still
            else:
                self.runtime.engine_failed(challenger=challenger)
        except Exception as fault:
            self.routed = False
            faults.fault("patching.fallback", fault)

    def _stood_still(self, error: Exception, target: routing.Target) -> bool:
        """Return whether the connection timed out only because the app's event loop was busy."""
        # A loop that was busy for long sees the timeout before it sees that the connection is there.
        waited_s = time.monotonic() - self._attempt_began
        return self.is_async and routing.is_connect_timeout(error) and waited_s > 1.25 * target.connect_timeout_s

    def _is_gone(self, policy: str | None) -> bool:
        """Return whether the store routes calls to another policy by now."""
        now = self.runtime.refreshed()
        return policy not in (now.champion, now.canary)

    def answered(self) -> None:
        """Note that the SDK has a result for the app. The record ends here, or for a stream when the stream ends."""
        try:
            # A policy answered. The reason of an earlier, failed attempt is no fallback any more.
            if self.exchange.policy is not None:
                self.exchange.fallback = None
                self.runtime.ended(self)
                self.runtime.engine_answered(challenger=self._asks_challenger)
            if not self.exchange.streamed:
                self.exchange.finish("complete")
        except Exception as error:
            faults.fault("patching.answered", error)

    def failed(self, error: BaseException) -> None:
        """Record that the call ends with an exception, which reaches the app unchanged."""
        try:
            if self.attempt is not None:
                self.runtime.ended(self)
                self.runtime.engine_released(challenger=self._asks_challenger)
            exchange = self.exchange
            if not exchange.request:
                # The engine was asked by a chat completion, and `policy` makes the reader read it as one.
                exchange.request = _request_body(error, self.options if self.attempt is None else self.attempt.options)
            if not isinstance(error, Exception):
                return exchange.finish("cancelled")
            # An answer that the SDK could not parse, for example one that was cut, is recorded as an answer.
            ended = "complete" if exchange.answer and not exchange.streamed else "failed"
            exchange.finish(ended, f"{type(error).__name__}: {error}")
        except Exception as fault:
            faults.fault("patching.failed", fault)

    @property
    def _asks_challenger(self) -> bool:
        return self.attempt is not None and self.attempt.target.asks_challenger

    def covers(self, options: Any) -> bool:
        """Return whether `options` are those of this call, which passes a second wrapper further down in the SDK."""
        return options is self.options or (self.attempt is not None and options is self.attempt.options)

    def claim(self, client: Any) -> bool:
        """Return whether a response that `client` has received is this call's. It is true once for each attempt."""
        if self._claimed or client is not (self.client if self.attempt is None else self.attempt.engine_client):
            return False
        self._claimed = True
        return True

    def capture(self, response: Any) -> None:
        """Record upstream's answer: at once if it is in memory; if it is a stream, while the app reads it."""
        try:
            exchange = self.exchange
            exchange.request = response.request.content
            if response.is_closed:
                exchange.saw(response.content)
            else:
                install(response, StreamTap(exchange, response.request), self.is_async)
        except Exception as error:
            faults.fault("patching.capture", error)

    def rewriter(self, attempt: Attempt, response: Any) -> ResponseRewriter:
        """Return the rewriter for the engine's answer; raise `InvalidAnswer` if its HTTP status is not 200."""
        if response.status_code != 200:
            raise InvalidAnswer(f"HTTP {response.status_code}")
        self.exchange.request = response.request.content
        rewriter = replace(self.surface.rewriter(self.options, attempt.options), takes_empty=self.takes_empty)
        self.exchange.keeps_logprobs = rewriter.keeps_logprobs
        return rewriter

    def rewrite_whole(self, rewriter: ResponseRewriter, response: Any) -> None:
        """Check an answer that is completely in memory, and replace its body with the rewritten one."""
        raw = response.content
        self.exchange.saw(raw)
        if self.stream:
            events = rewriter.stream()
            out = events.feed(raw) + events.end()
        else:
            out = rewriter.whole(raw)
        # The same object with another body keeps history, elapsed time and extensions. `_content` is private to the
        # HTTP library; if a release keeps the body elsewhere, the line after it notices.
        response._content = out
        if response.content is not out:
            raise InvalidAnswer("it cannot be rewritten")
        if "content-length" in response.headers:
            response.headers["content-length"] = str(len(out))

    def first_token_timeout_s(self, attempt: Attempt, response: Any) -> float:
        """Return the seconds the stream may take to begin. The pause between later chunks may last `timeout_s`."""
        timeout = response.request.extensions.get("timeout")
        if isinstance(timeout, dict):  # the HTTP library reads it once, when the body begins
            timeout["read"] = patience_s(self.options, self.client, attempt.target.timeout_s)
        return patience_s(self.options, self.client, attempt.target.first_token_timeout_s)

    def read_held_back(self, events: StreamRewriter, chunk: bytes) -> bytes:
        """Record a chunk of a stream that is held back, and return its rewritten bytes."""
        self.exchange.saw(chunk)
        return events.feed(chunk)

    def hand_out_stream(self, response: Any, events: StreamRewriter, opened: Any, before: list[bytes]) -> None:
        """Give a stream that has started to the app: first the bytes that were held back, then the rest as it comes."""
        if not events.started:  # the stream has ended, perhaps in the middle of a line
            before.append(events.end())
        # A stream that breaks later counts against the engine too, although the app has its first half.
        failed = partial(self.runtime.engine_failed, challenger=self._asks_challenger)
        tap = StreamTap(self.exchange, response.request, events, failed)
        install(response, tap, self.is_async, opened, b"".join(before))


def _is_replay(who: Identity) -> bool:
    return who.trajectory is not None and REPLAY_OF in who.trajectory.metadata


def pending_call() -> RoutedCall | None:
    """Return the call in which this is called, below the SDK; `None` if that is neither routed nor recorded."""
    return PENDING.get()


def begin(
    runtime: Runtime | None, client: Any, options: Any, stream: bool, is_async: bool, learn: bool = True
) -> RoutedCall | None:
    """Return the `RoutedCall` of a call that starts; `None` if the call is to be neither routed nor recorded.

    `learn` is whether the call's headers let its run be learned from.
    """
    if runtime is None:
        return None
    try:
        # Before the target is read: it may poll a newer route.
        runtime.ensure_running()
        surface = surface_of(options)
        if surface is None or runtime.target.mode == "off":
            return None
        if runtime.matches is not None and not runtime.matches(options.json_data):
            return None
        who = identify(call=True)
        if who.suppressed:
            return None
        who.learn = who.learn and learn and runtime.settings.learn
        return RoutedCall(runtime, surface, client, options, stream, is_async, who)
    except Exception as error:
        faults.fault("patching.begin", error)
        return None


def _request_body(error: BaseException, options: Any) -> bytes:
    with suppress(Exception):  # httpx raises where an error has no request, or the request was never read
        content: Any = getattr(getattr(error, "request", None), "content", None)
        if isinstance(content, bytes):
            return content
    try:
        return json.dumps(options.json_data, default=repr).encode()
    except (ValueError, TypeError, RecursionError):  # the SDK could not write it either
        return b""
