"""`gen_ai.*` spans for the app's own OpenTelemetry, made after the fact from finished calls.

The call itself only keeps the context it started in (`Exchange.otel_context`). The writer thread makes the span, with
the times at which things happened, once the call is read and redacted; so what is not recorded has no span either.
Nothing is made without a tracer provider of the app's, inside OpenTelemetry's `suppress_instrumentation`, or with
`Settings.otel == "off"`. Only the API is used; the SDK is the app's.

A call's span is a child of the span that was active when the call started. Where none was, the calls of one
`trajectory()` get a parent of their own, `invoke_agent NAME`, so that a run is one trace; it ends with the block.
`span()` makes no OpenTelemetry span: it would have to exist before the calls inside, and it is known when it ends. The
calls name it in `art.span.id`.

Names are those of the GenAI semantic conventions (`genai_attributes`). Texts are left out unless
OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT asks for them on spans.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.context.context import Context

from art_patch._lib.faults import faults
from art_patch._lib.loose_json import as_object, parse_object
from art_patch._lib.version import __version__
from art_patch.otel import (
    error_type,
    input_messages,
    operation_of,
    output_messages,
    request_attributes,
    trajectory_attributes,
)
from art_patch.recording.chat import events, is_whole
from art_patch.recording.exchange import Exchange
from art_patch.types import UPSTREAM, Call, Record, TrajectoryInfo

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
# How many trajectories are remembered; one that was forgotten has its span ended.
MAX_RUNS = 10_000

_ON_SPANS = frozenset({"span_only", "span_and_event", "true"})
_FIRST_EVENT_BYTES = 64 << 10

# By the end of the host's name; all others are `openai`, whose protocol they speak.
_PROVIDERS = {
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "openai.azure.com": "azure.ai.openai",
}


@dataclass(slots=True)
class _Run:
    """A trajectory that is remembered.

    Attributes:
        info: as it was recorded.
        span: parent of its calls; made when it is first needed.
        until: when its last call ended.
    """

    info: TrajectoryInfo
    span: trace.Span | None = None
    until: float = 0.0


class Telemetry:
    """Makes spans. Owned by the writer thread."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def saw(self, item: object, records: Sequence[Record]) -> None:
        """Make spans of what became of a queue item.

        Args:
            item: what was in the queue; an `Exchange` says in which context its call started.
            records: what goes to the store of it.
        """
        try:
            for record in records:
                if isinstance(record, TrajectoryInfo):
                    self._remember(record)
                elif isinstance(record, Call) and isinstance(item, Exchange) and item.otel_context is not None:
                    self._call(record, item, item.otel_context)
        except Exception as error:
            faults.fault("recording.telemetry", error)

    def close(self) -> None:
        """End the spans of trajectories that have not ended."""
        for run in self._runs.values():
            _end(run)
        self._runs.clear()

    def _remember(self, info: TrajectoryInfo) -> None:
        run = self._runs.setdefault(info.id, _Run(info))
        self._runs.move_to_end(info.id)
        if run.info.ended_at is None:  # a score that comes late announces the trajectory once more
            run.info = info
        if info.ended_at is not None:
            _end(run)
        while len(self._runs) > MAX_RUNS:
            _end(self._runs.popitem(last=False)[1])

    def _call(self, call: Call, exchange: Exchange, context: Context) -> None:
        tracer = _tracer()
        if tracer is None or context.get(getattr(otel, "_SUPPRESS_INSTRUMENTATION_KEY", "")):
            return
        run = self._runs.get(call.trajectory_id)
        info = exchange.trajectory if run is None else run.info
        attributes = _attributes(call, info or TrajectoryInfo(call.trajectory_id, call.started_at), exchange)
        ended_at = call.started_at + call.duration_ms / 1000
        alone = not trace.get_current_span(context).get_span_context().is_valid
        try:
            if alone and run is not None and run.info.origin == "explicit":
                context = trace.set_span_in_context(_span_of(run, tracer, context), context)
            span = tracer.start_span(
                f"{attributes['gen_ai.operation.name']} {call.requested_model}",
                context,
                trace.SpanKind.CLIENT,
                attributes,
                start_time=_ns(call.started_at),
            )
            if call.status == "error":
                span.set_status(trace.Status(trace.StatusCode.ERROR, call.error))
            span.end(_ns(ended_at))
            if run is not None:
                run.until = max(run.until, ended_at)
                if run.info.ended_at is not None:
                    _end(run)
        except Exception as error:  # the app's own span processors
            faults.trouble("telemetry", error)


def _tracer() -> trace.Tracer | None:
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("art_patch", __version__)


def _span_of(run: _Run, tracer: trace.Tracer, context: Context) -> trace.Span:
    if run.span is None:
        name = run.info.name
        attributes = {"gen_ai.operation.name": "invoke_agent", **trajectory_attributes(run.info)}
        if name is not None:
            attributes["gen_ai.agent.name"] = name
        run.span = tracer.start_span(
            "invoke_agent" if name is None else f"invoke_agent {name}",
            context,
            attributes=attributes,
            start_time=_ns(run.info.started_at),
        )
    return run.span


def _end(run: _Run) -> None:
    span, info = run.span, run.info
    if span is None or not span.is_recording():
        return  # nobody needed it, or it has ended: a stream of the trajectory may end later
    try:
        if info.error is not None:
            span.set_attribute("error.type", error_type(info.error))
            span.set_status(trace.Status(trace.StatusCode.ERROR, info.error))
        span.end(_ns(info.ended_at or run.until))
    except Exception as error:
        faults.trouble("telemetry", error)


def _attributes(call: Call, info: TrajectoryInfo, exchange: Exchange) -> dict[str, Any]:
    host, port = _address(str(exchange.server or ""))
    answer = _answer_head(exchange)
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(call.api),
        "gen_ai.provider.name": "vllm" if call.policy is not UPSTREAM else _provider(host),
        "gen_ai.request.model": call.requested_model,
        "gen_ai.response.model": call.policy or _text(answer.get("model")),
        "gen_ai.response.id": _text(answer.get("id")),
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in call.choices if choice.finish_reason],
        "gen_ai.response.time_to_first_chunk": None if call.ttft_ms is None else call.ttft_ms / 1000,
        "gen_ai.usage.input_tokens": call.prompt_tokens or None,
        "gen_ai.usage.output_tokens": call.completion_tokens or None,
        "server.address": host,
        "server.port": port,
        **request_attributes(call.params),
        **trajectory_attributes(info),
        "art.trajectory.id": call.trajectory_id,
        "art.span.id": call.span_id,
        "art.call.id": call.id,
        "art.served_by": call.policy or "upstream",
        "art.fallback": call.fallback,
    }
    if exchange.streamed:
        found["gen_ai.request.stream"] = True
    if call.status == "error":
        found["error.type"] = error_type(call.error or "")
    elif call.status != "ok":
        found["art.status"] = call.status
    if os.environ.get(CAPTURE, "").strip().lower() in _ON_SPANS:
        found["gen_ai.input.messages"] = _json(input_messages(call))
        found["gen_ai.output.messages"] = _json(output_messages(call))
        found["gen_ai.tool.definitions"] = _json(call.tools) if call.tools else None
    return {key: value for key, value in found.items() if value not in (None, "", [])}


def _answer_head(exchange: Exchange) -> Mapping[str, Any]:
    """Return what the answer says of itself: a whole answer, or the first event of a stream."""
    raw = b"".join(exchange.answer)
    try:
        raw = exchange.decode(raw) if raw and exchange.decode is not None else raw
    except Exception:  # the app gave up in the middle of a compressed stream
        return {}
    head = parse_object(raw if is_whole(raw) else next(events(raw[:_FIRST_EVENT_BYTES]), "").encode())
    return as_object(head["response"]) if "response" in head else head  # Responses wraps it in an event


def _address(server: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(server)
        return parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None, None


def _provider(host: str | None) -> str:
    return next((name for end, name in _PROVIDERS.items() if (host or "").endswith(end)), "openai")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
