"""Sends runs of the agent as OpenTelemetry traces over OTLP/HTTP (protobuf), with the GenAI semantic conventions.

A run becomes the span `invoke_agent NAME`. Below it are the spans of the run, and each call as a span `chat MODEL`
under the span in which it was made. Scores become log records `gen_ai.evaluation.result` of the run's span.

The spans and log records are sent by OpenTelemetry's own client, which reads its own environment variables
(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_TIMEOUT`, ...).
"""

import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from art_patch import otel
from art_patch._lib.version import __version__
from art_patch.errors import TrackerError
from art_patch.trackers.episodes import Episode, Item, hash_of, trace_id_of, without_login
from art_patch.types import Call, Score, SpanInfo, TrajectoryInfo

DEFAULT_ENDPOINT = "http://localhost:4318"

_LONGEST_REASON = 300
_BATCH = 200  # spans a request: with texts in them they are large
_SCOPE = InstrumentationScope("art_patch", __version__)
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_OPERATIONS = {"agent": "invoke_agent", "tool": "execute_tool", "retrieval": "retrieval"}
_NAMES = {"agent": "gen_ai.agent.name", "tool": "gen_ai.tool.name"}
_TOOL_CONTENT = {"input": "gen_ai.tool.call.arguments", "output": "gen_ai.tool.call.result"}
_CONTENT = {"input": "input.value", "output": "output.value"}


class Otlp:
    """The tracker that writes to an OpenTelemetry collector, or to any other backend that accepts OTLP."""

    name = "otlp"
    keys = "OTEL_EXPORTER_OTLP_HEADERS"

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        service: str,
        content: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Make the exporters; no connection is opened yet.

        Args:
            endpoint: address of the collector, without `/v1/traces`.
            content: whether texts of people and models are sent.
            headers: sent with every request; default: those of OpenTelemetry's variables.
        """
        root = endpoint.rstrip("/")
        self.target = f"otlp {without_login(root)}"
        self.content = content
        self._resource = Resource({"service.name": service})
        self._spans = OTLPSpanExporter(f"{root}/v1/traces", headers=headers, compression=Compression.Gzip)
        self._logs = OTLPLogExporter(f"{root}/v1/logs", headers=headers, compression=Compression.Gzip)

    def of_episode(self, episode: Episode) -> Iterable[Item]:
        """Return an item each for the run, its spans, its calls and its scores."""
        trajectory = episode.trajectory
        run = context_of(trajectory.id, f"trajectory:{trajectory.id}")
        inside = {span.id: context_of(trajectory.id, f"span:{span.id}") for span in trajectory.spans}
        # A run and its spans never change after their end, so their digest is empty; that of a score follows its value.
        yield Item(f"trajectory:{trajectory.id}", "", self._run(episode, run), trajectory.id)
        # A span or call whose parent was not recorded is shown directly under the run.
        for span in trajectory.spans:
            made = self._span(span, inside[span.id], inside.get(span.parent_id or "", run), episode)
            yield Item(f"span:{span.id}", "", made, trajectory.id)
        for call in trajectory.calls:
            made = self._call(call, inside.get(call.span_id or "", run), episode)
            yield Item(f"call:{call.id}", "", made, trajectory.id)
        for score in trajectory.scores:
            digest = hash_of(f"{score.name} {score.value!r} {score.at!r} {score.comment}", 8).hex()
            yield Item(f"score:{score.id}", digest, self.of_score(score, run, episode), trajectory.id)

    def of_all(self, info: TrajectoryInfo) -> dict[str, Any]:
        """Return the attributes that every span of a run gets."""
        return otel.trajectory_attributes(info)

    def of_score(self, score: Score, run: trace.SpanContext, episode: Episode) -> Any:
        """Return a score as the log record that `write` sends."""
        attributes: dict[str, Any] = {
            "gen_ai.evaluation.name": score.name,
            "gen_ai.evaluation.score.value": float(score.value),
            "art.score.id": score.id,
            "art.score.source": score.source,
            "art.trajectory.id": score.trajectory_id,
        }
        if self.content and score.comment:
            attributes["gen_ai.evaluation.explanation"] = score.comment
        record = LogRecord(
            timestamp=_ns(score.at),
            observed_timestamp=_ns(score.at),
            context=trace.set_span_in_context(trace.NonRecordingSpan(run)),
            severity_number=SeverityNumber.INFO,
            attributes=attributes,
            event_name="gen_ai.evaluation.result",
        )
        return ReadableLogRecord(record, self._resource, _SCOPE)

    def write(self, items: Sequence[Item]) -> None:
        """Send first the spans and then the scores, which refer to a span."""
        kinds = (("spans", ReadableSpan, self._spans), ("scores as logs", ReadableLogRecord, self._logs))
        with _export_errors() as told:
            for what, kind, exporter in kinds:
                payloads: list[Any] = [item.payload for item in items if isinstance(item.payload, kind)]
                for start in range(0, len(payloads), _BATCH):
                    if exporter.export(payloads[start : start + _BATCH]).name != "SUCCESS":
                        raise self.refused(f"{what} ({told.first or 'no reason given'})")

    def refused(self, what: str) -> TrackerError:
        """Return the error to raise for items that the collector refused; `what` names them."""
        return TrackerError(
            f"{self.target} did not take {what}; look at the address, its log, and {self.keys}, then send again"
        )

    def _run(self, episode: Episode, own: trace.SpanContext) -> ReadableSpan:
        info = episode.trajectory.info
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": info.name,
            # Langfuse reads these three names, not those of `gen_ai`.
            "session.id": info.session_id,
            "user.id": info.user_id,
            "langfuse.trace.tags": list(info.tags),
            "art.origin": info.origin,
            **self.of_all(info),
        }
        name = "invoke_agent" if info.name is None else f"invoke_agent {info.name}"
        return self.span(name, own, None, attributes, info.started_at, episode.ended_at, info.error)

    def _span(
        self, span: SpanInfo, own: trace.SpanContext, parent: trace.SpanContext, episode: Episode
    ) -> ReadableSpan:
        operation = _OPERATIONS.get(span.kind)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            _NAMES.get(span.kind, "art.span.name"): span.name,
            "art.span.id": span.id,
            "art.span.kind": span.kind,
            **self.of_all(episode.trajectory.info),
        }
        if self.content:
            for key, attribute in (_TOOL_CONTENT if span.kind == "tool" else _CONTENT).items():
                value = span.attributes.get(key)
                attributes[attribute] = value if value is None or isinstance(value, str) else otel.as_json(value)
        name = span.name if operation is None else f"{operation} {span.name}"
        # A span whose end was not recorded ends with the run.
        return self.span(name, own, parent, attributes, span.started_at, span.ended_at or episode.ended_at, span.error)

    def _call(self, call: Call, parent: trace.SpanContext, episode: Episode) -> ReadableSpan:
        info = episode.trajectory.info
        own = context_of(info.id, f"call:{call.id}")
        attributes = otel.call_attributes(call, info) | self.of_all(info)
        attributes["gen_ai.provider.name"] = "openai" if call.policy is None else "vllm"
        if self.content:
            attributes |= otel.content_attributes(call)
        # A stream that the app abandoned is no failure of the call: only `error` is.
        until = call.started_at + call.duration_ms / 1000
        failed = (call.error or "") if call.status == "error" else None
        name = f"{otel.operation_of(call.api)} {call.requested_model}"
        return self.span(name, own, parent, attributes, call.started_at, until, failed, kind="CLIENT")

    def span(
        self,
        name: str,
        own: trace.SpanContext,
        parent: trace.SpanContext | None,
        attributes: Mapping[str, Any],
        start: float,
        end: float,
        error: str | None,
        *,
        kind: Literal["INTERNAL", "CLIENT"] = "INTERNAL",
    ) -> ReadableSpan:
        """Return a finished span with these ids and times. Attributes whose value is `None` are left out."""
        failed = {} if error is None else {"error.type": otel.error_type(error)}
        status = trace.Status() if error is None else trace.Status(trace.StatusCode.ERROR, error)
        # Made directly: a tracer would choose ids and times itself.
        return ReadableSpan(
            name,
            own,
            parent,
            self._resource,
            otel.without_empty({**attributes, **failed}),
            kind=trace.SpanKind[kind],
            status=status,
            start_time=_ns(start),
            end_time=_ns(end),
            instrumentation_scope=_SCOPE,
        )


class _ExportErrors(logging.Handler):
    first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line that OpenTelemetry's client logs; later ones say that it is tried again."""
        self.first = self.first or record.getMessage()[:_LONGEST_REASON]


@contextmanager
def _export_errors() -> Generator[_ExportErrors]:
    # The exporters return only success or failure. The reason is in their log, once for each retry.
    logger, told = logging.getLogger("opentelemetry.exporter"), _ExportErrors()
    propagate, logger.propagate = logger.propagate, False  # else the same lines would also appear on stderr
    logger.addHandler(told)
    try:
        yield told
    finally:
        logger.removeHandler(told)
        logger.propagate = propagate


def context_of(trajectory_id: str, key: str) -> trace.SpanContext:
    """Return the trace id and span id for a span of a run; `key` identifies the span among all spans."""
    # Hashes, so that sending twice makes the same ids. The run's own id is the trace id where that is valid: a run that
    # an app's own OpenTelemetry trace identified joins that trace.
    trace_id = int(trace_id_of(trajectory_id), 16)
    return trace.SpanContext(trace_id, int.from_bytes(hash_of(key, 8)), is_remote=False, trace_flags=_SAMPLED)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
