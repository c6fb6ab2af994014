"""One logical call from its start to its end: recorded once, tried at the champion, sent upstream if that fails.

A canary that is tested beside the champion is tried in its place for a share of the sessions, and no call is tried at
both. What fails at a challenger is recorded as a fallback that begins with its name, `NAME@STEP: `.

Blind to sync and async: `wrapping` asks for the next attempt, runs it, and reports what became of it. Our own faults
never leave this module (`faults.fault`); what is raised here on purpose is `InvalidAnswer`, which sends the call
upstream.
"""

from __future__ import annotations

import json
import time
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from art_patch._lib.faults import faults, is_fault
from art_patch.context import Identity, identify
from art_patch.patching.rewriting.engine_request import patience_s
from art_patch.patching.rewriting.response_rewriter import EmptyAnswer, InvalidAnswer, ResponseRewriter, StreamRewriter
from art_patch.patching.routing.engine_health import as_recorded, is_about_the_engine, is_connect_timeout, reason
from art_patch.patching.routing.pins import Key, sticky_key
from art_patch.patching.routing.target import Target
from art_patch.patching.runtime import Runtime
from art_patch.patching.sdk.stream_tap import StreamTap, install
from art_patch.patching.sdk.surfaces import Surface, surface_of
from art_patch.recording import Exchange, in_share

PENDING: ContextVar[RoutedCall | None] = ContextVar("art_patch_routed_call", default=None)
"""The call that is inside `request` right now, for `_process_response`, which the SDK calls further down."""

_MAX_LEGS = 2
"""The policy, and the one that has just taken its place; or the same once more, see `_stood_still`."""


class Attempt(NamedTuple):
    """One try at a policy.

    Attributes:
        target: where it goes; its champion is the policy that is asked.
        engine_client: the client that sends it.
        options: the request as the champion gets it.
    """

    target: Target
    engine_client: Any
    options: Any


class RoutedCall:
    """See the module."""

    __slots__ = (
        "_attempt_began",
        "_claimed",
        "_identity",
        "_legs",
        "_run",
        "_was_empty",
        "attempt",
        "client",
        "exchange",
        "is_async",
        "options",
        "routed",
        "runtime",
        "stream",
        "surface",
        "takes_empty",
    )

    def __init__(
        self,
        runtime: Runtime,
        surface: Surface,
        client: Any,
        options: Any,
        stream: bool,
        is_async: bool,
        identity: Identity,
    ) -> None:
        """Take down who is calling, in which context."""
        self.runtime = runtime
        self.surface = surface
        self.client = client
        self.options = options
        self.stream = stream
        self.is_async = is_async
        self.attempt: Attempt | None = None
        self._claimed = False
        self._legs = 0
        self._was_empty = False
        self.takes_empty = False
        self._attempt_began = 0.0
        self._identity = identity
        self._run: Key | None = None
        model = options.json_data.get("model")
        self.exchange = Exchange(
            runtime.recorder,
            model if isinstance(model, str) else "",
            identity.trajectory,
            identity.span_id,
            identity.group_key,
        )
        self.exchange.api = surface.api
        if runtime.settings.otel == "auto":
            self.exchange.otel_context = identity.otel_context
        self.exchange.server = client.base_url
        target = runtime.target
        may_be_routed = target.serves or target.unknown is not None
        if may_be_routed and surface.why_not_routed(options, stream, runtime.settings) is None:
            self.routed, self.exchange.fallback = target.serves, target.unknown
        else:
            self.routed = False
        if self.routed and (target.mode != "route" or target.challenger_state == "shadow"):
            self._choose(target, identity)

    def _choose(self, target: Target, identity: Identity) -> None:
        """Decide where a policy is asked in the background, or only a share of the calls is ours."""
        key = sticky_key(identity, self.options.json_data)
        if target.mode == "shadow" or target.challenger_state == "shadow":
            self.exchange.shadow = in_share(key, self.runtime.settings.shadow_rate, "shadow")
        if target.mode == "shadow":
            self.routed = False
        elif target.mode == "canary":
            self.routed = in_share(key, target.canary_percent / 100, "canary")

    # The attempts.

    def next_attempt(self) -> Attempt | None:
        """Return the next try at the champion, while it is `routed`; `None` if the call goes upstream now."""
        try:
            if self._legs < _MAX_LEGS:
                self.attempt = self._make_attempt(self.runtime.target)
        except Exception as error:
            self.routed = False
            faults.fault("patching.route", error)
        return self.attempt

    def last_attempt(self, error: Exception) -> Attempt | None:
        """Return one more try at a policy that had nothing to say, after upstream failed with `error`.

        An app that has no provider, or whose provider is down, is better off with an empty answer than with an error.
        """
        if not self._was_empty or is_fault(error):
            return None
        try:
            self._was_empty, self._claimed, self.takes_empty = False, False, True
            self.exchange.forget_answer()
            self.attempt = self._make_attempt(self.runtime.target)
        except Exception as fault:
            faults.fault("patching.route", fault)
        return self.attempt

    def _make_attempt(self, target: Target) -> Attempt | None:
        engine_client = self.runtime.engine_clients.get(self.client, target, self.is_async) if target.routes else None
        if (
            engine_client is None
        ):  # nobody serves any more, or the app talks to the engine itself, for example to judge with it
            return None
        target = self._pinned(target)
        if not self.runtime.allows(challenger=target.asks_challenger):
            self.exchange.fallback = as_recorded(target, "the engine failed repeatedly and is left alone for a moment")
            return None
        self._legs += 1
        self._attempt_began = time.monotonic()
        attempt = Attempt(target, engine_client, self.surface.to_engine_request(self.options, target, self.client))
        self.runtime.began(self)
        self.exchange.policy = target.champion
        self.exchange.server = target.base_url
        return attempt

    def _pinned(self, target: Target) -> Target:
        """The target, with the policy that this run of the agent began with."""
        asked, self._run = self.runtime.pins.policy(self._identity, self.options.json_data, target)
        return target if asked == target.champion else replace(target, champion=asked)

    def attempt_failed(self, error: Exception) -> None:
        """The policy did not answer; decide whether the one in its place now is asked."""
        if is_fault(error):
            raise error
        try:
            attempt, self.attempt = self.attempt, None
            self._claimed = False  # there will be another response
            self._was_empty = isinstance(error, EmptyAnswer)
            self.runtime.ended(self)
            self.exchange.forget_answer()
            self.exchange.server = self.client.base_url
            challenger = attempt is not None and attempt.target.asks_challenger
            self.exchange.fallback = reason(error) if attempt is None else as_recorded(attempt.target, reason(error))
            status: Any = getattr(error, "status_code", None)
            # A champion may have been replaced this second: ask the store who serves now.
            may_be_gone = status == 404 and self._legs < _MAX_LEGS
            if status == 404 and self._run is not None:
                self.runtime.pins.forget(self._run)
            if may_be_gone and attempt is not None and self._is_gone(attempt.target.champion):
                self.runtime.engine_released(challenger=challenger)
                return
            if attempt is not None and self._stood_still(error, attempt.target):
                self.runtime.engine_released(challenger=challenger)
                return
            self.routed = False
            if is_about_the_engine(error):
                self.runtime.engine_failed(challenger=challenger)
            else:
                self.runtime.engine_released(challenger=challenger)
        except Exception as fault:
            self.routed = False
            faults.fault("patching.fallback", fault)

    def _stood_still(self, error: Exception, target: Target) -> bool:
        """Whether connecting took too long because the app's event loop did something else; it is tried once more.

        The loop sees that time is up before it sees that the connection is there.
        """
        waited_s = time.monotonic() - self._attempt_began
        is_late = waited_s > 2 * target.connect_timeout_s
        return self.is_async and self._legs < _MAX_LEGS and is_connect_timeout(error) and is_late

    def _is_gone(self, policy: str | None) -> bool:
        """Whether calls go to another policy by now, as the store says."""
        now = self.runtime.refreshed()
        return policy not in (now.champion, now.canary)

    # The end.

    def answered(self) -> None:
        """The SDK has its result. A stream goes on from here; everything else is over."""
        try:
            if self.exchange.policy is not None:
                self.exchange.fallback = None
                self.runtime.ended(self)
                self.runtime.engine_answered(challenger=self._asks_challenger)
            if not self.exchange.streamed:
                self.exchange.finish("complete")
        except Exception as error:
            faults.fault("patching.answered", error)

    def failed(self, error: BaseException) -> None:
        """The call ends with an exception, which the caller will get as it is."""
        try:
            if self.attempt is not None:
                self.runtime.ended(self)
                self.runtime.engine_released(challenger=self._asks_challenger)
            exchange = self.exchange
            if not exchange.request:
                # What the champion was asked is in the words of chat, and is read so.
                exchange.request = _request_body(error, self.options if self.attempt is None else self.attempt.options)
            if not isinstance(error, Exception):
                exchange.finish("cancelled")
            elif exchange.answer and not exchange.streamed:
                # The answer came, and the SDK did not like it (cut too early to parse, say): an answer all the same.
                exchange.finish("complete", f"{type(error).__name__}: {error}")
            else:
                exchange.finish("failed", f"{type(error).__name__}: {error}")
        except Exception as fault:
            faults.fault("patching.failed", fault)

    # What the wrappers ask.

    @property
    def _asks_challenger(self) -> bool:
        return self.attempt is not None and self.attempt.target.asks_challenger

    def covers(self, options: Any) -> bool:
        """Whether a request with these options is this very call, seen again further down."""
        return options is self.options or (self.attempt is not None and options is self.attempt.options)

    def claim(self, client: Any) -> bool:
        """Whether the response that `client` processes is this call's; true once a attempt."""
        if self._claimed or client is not (self.client if self.attempt is None else self.attempt.engine_client):
            return False
        self._claimed = True
        return True

    def capture(self, response: Any) -> None:
        """Read along with upstream's answer."""
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
        """Begin to check the champion's answer."""
        if response.status_code != 200:
            raise InvalidAnswer(f"HTTP {response.status_code}")
        self.exchange.request = response.request.content
        rewriter = replace(self.surface.rewriter(self.options, attempt.options), takes_empty=self.takes_empty)
        self.exchange.keeps_logprobs = rewriter.keeps_logprobs
        return rewriter

    def rewrite_whole(self, rewriter: ResponseRewriter, response: Any) -> None:
        """Check and rewrite an answer that is in memory."""
        raw = response.content
        self.exchange.saw(raw)
        if self.stream:
            events = rewriter.stream()
            out = events.feed(raw) + events.end()
        else:
            out = rewriter.whole(raw)
        # The same object with another body: history, elapsed time and extensions stay. The check is for the day when
        # the HTTP library keeps its body elsewhere.
        response._content = out
        if response.content is not out:
            raise InvalidAnswer("it cannot be rewritten")
        if "content-length" in response.headers:
            response.headers["content-length"] = str(len(out))

    def peek(self, rewriter: ResponseRewriter, response: Any) -> StreamRewriter:
        """Begin to check a stream; the caller reads it until it has started."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise InvalidAnswer("a compressed stream")
        return rewriter.stream()

    def first_token_timeout_s(self, attempt: Attempt, response: Any) -> float:
        """Return how long the stream may take to begin; from then on the longer limit between two chunks holds."""
        timeout = response.request.extensions.get("timeout")
        if isinstance(timeout, dict):  # the HTTP library looks at it when the body begins
            timeout["read"] = patience_s(self.options, self.client, attempt.target.timeout_s)
        return patience_s(self.options, self.client, attempt.target.first_token_timeout_s)

    def read(self, events: StreamRewriter, chunk: bytes) -> bytes:
        """Take what came of a stream that is held back; return what is to be handed out once it has started."""
        self.exchange.saw(chunk)
        return events.feed(chunk)

    def roll(self, response: Any, events: StreamRewriter, opened: Any, before: list[bytes]) -> None:
        """Hand out a stream that says something."""
        if not events.started:  # it has ended, perhaps in the middle of a line
            before.append(events.end())
        failed = partial(self.runtime.engine_failed, challenger=self._asks_challenger)
        tap = StreamTap(self.exchange, response.request, events, failed)
        install(response, tap, self.is_async, opened, b"".join(before))


def begin(runtime: Runtime | None, client: Any, options: Any, stream: bool, is_async: bool) -> RoutedCall | None:
    """Return the routed_call of a call that starts, `None` if it is none of ours."""
    if runtime is None:
        return None
    try:
        runtime.ensure_running()
        surface = surface_of(options)
        if surface is None or runtime.target.mode == "off":
            return None
        if runtime.matches is not None and not runtime.matches(options.json_data):
            return None
        identity = identify(call=True)
        if identity.suppressed:
            return None
        return RoutedCall(runtime, surface, client, options, stream, is_async, identity)
    except Exception as error:
        faults.fault("patching.begin", error)
        return None


def _request_body(error: BaseException, options: Any) -> bytes:
    content: Any = None
    try:
        content = getattr(getattr(error, "request", None), "content", None)
    except Exception:  # httpx raises where an error has no request, or the request was never read
        content = None
    if isinstance(content, bytes):
        return content
    try:
        return json.dumps(options.json_data, default=repr).encode()
    except (ValueError, TypeError, RecursionError):  # the SDK could not write it either
        return b""
