"""Makes `gen_ai.*` spans for the app's own OpenTelemetry SDK, from calls that have ended.

While a call runs, only the OpenTelemetry context of its start is kept. The recorder's thread makes the span after the
call is parsed and redacted; therefore a call that is not recorded has no span. No span is made if the app has no tracer
provider, inside OpenTelemetry's `suppress_instrumentation`, or with `otel="off"`.

The parent of a call's span is the span that was active when the call started. If none was, the calls of a
`trajectory()` get a span `invoke_agent NAME` as their parent, so that a run is one trace; this span ends with the
block. `span()` makes no OpenTelemetry span, because such a span would have to exist before the calls inside it; the
spans of these calls have the id of `span()` in the attribute `art.span.id`. Texts are added to spans only if the
variable OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT asks for them.
"""

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
from art_patch._lib.loose_json import as_object, as_text, parse_object
from art_patch._lib.version import __version__
from art_patch.otel import call_attributes, content_attributes, error_type, trajectory_attributes, without_empty
from art_patch.recording.chat import events, is_whole
from art_patch.recording.exchange import Exchange
from art_patch.types import UPSTREAM, Call, Record, TrajectoryInfo

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
# So many trajectories are remembered. The span of a forgotten one is ended.
MAX_RUNS = 10_000

_ON_SPANS = frozenset({"span_only", "span_and_event", "true"})
# The first event of a stream names the model and the id. Parsing more would read the answer twice.
_FIRST_EVENT_BYTES = 64 << 10

# By the end of the host's name. All other hosts count as `openai`, whose protocol they speak.
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
    """A trajectory that is remembered, and the span that is the parent of its calls."""

    info: TrajectoryInfo
    span: trace.Span | None = None  # made when a call first needs it
    until: float = 0.0  # when the last call ended, in seconds since the epoch


class Telemetry:
    """Makes the OpenTelemetry spans of recorded calls. Only the recorder's thread uses it."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    def saw(self, item: object, records: Sequence[Record]) -> None:
        """Make the spans for the records into which a queue item was converted."""
        try:
            for record in records:
                if isinstance(record, TrajectoryInfo):
                    self._remember(record)
                elif isinstance(record, Call) and isinstance(item, Exchange) and item.otel_context is not None:
                    self._call(record, item, item.otel_context)
        except Exception as error:
            faults.fault("recording.telemetry", error)

    def close(self) -> None:
        """End all open `invoke_agent` spans, when the recorder stops."""
        while self._runs:
            _end(self._runs.popitem()[1])

    def _remember(self, info: TrajectoryInfo) -> None:
        run = self._runs.setdefault(info.id, _Run(info))
        self._runs.move_to_end(info.id)
        if run.info.ended_at is None:  # a late score announces the trajectory again, without its end
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
        except Exception as error:  # raised by the app's span processors
            faults.trouble("telemetry", error)


def _tracer() -> trace.Tracer | None:
    # Looked up for each call: the app may set its provider after `patch()`.
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("art_patch", __version__)


def _span_of(run: _Run, tracer: trace.Tracer, context: Context) -> trace.Span:
    if run.span is None:
        name, attributes = "invoke_agent", {"gen_ai.operation.name": "invoke_agent", **trajectory_attributes(run.info)}
        if run.info.name is not None:
            name, attributes["gen_ai.agent.name"] = f"invoke_agent {run.info.name}", run.info.name
        run.span = tracer.start_span(name, context, attributes=attributes, start_time=_ns(run.info.started_at))
    return run.span


def _end(run: _Run) -> None:
    span, info = run.span, run.info
    if span is None or not span.is_recording():
        return  # no call needed the span, or it has ended: a stream may end after its trajectory
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
    found = call_attributes(call, info) | {
        "gen_ai.provider.name": "vllm" if call.policy is not UPSTREAM else _provider(host),
        "gen_ai.response.id": as_text(answer.get("id")),
        "gen_ai.request.stream": True if exchange.streamed else None,
        "server.address": host,
        "server.port": port,
        "art.trajectory.id": call.trajectory_id,
    }
    if os.environ.get(CAPTURE, "").strip().lower() in _ON_SPANS:
        found |= content_attributes(call)
    return without_empty(found)


def _answer_head(exchange: Exchange) -> Mapping[str, Any]:
    """Return the whole answer, or the first event of a stream."""
    raw = exchange.whole_answer()
    head = parse_object(raw if is_whole(raw) else next(events(raw[:_FIRST_EVENT_BYTES]), "").encode())
    return as_object(head["response"]) if "response" in head else head  # the Responses API wraps it in an event


def _address(server: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(server)
        return parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None, None


def _provider(host: str | None) -> str:
    return next((name for end, name in _PROVIDERS.items() if (host or "").endswith(end)), "openai")


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
