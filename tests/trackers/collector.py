"""A collector for tests: takes OTLP over HTTP, keeps what it was sent, decoded. Also a stand-in for Langfuse."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What came, one dictionary a span or a log record; `status` is what it answers from now on."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.logs: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.scores: list[dict[str, Any]] = []
        self.status = 200
        self.rejects = 0
        self.address = ""

    def take(self, path: str, body: bytes) -> dict[str, Any] | None:
        """Keep what came; return what is answered, if anything is."""
        if path == "/api/public/scores":  # Langfuse's, as its client 5.0.4 calls it
            self.scores += json.loads(body)
            if self.rejects:
                return {"accepted": 0, "rejected": self.rejects, "errors": [{"message": "no such trace"}]}
            return {"message": "Accepted"}
        if path.removeprefix("/api/public/otel") == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans += [_span(span, _plain(resource.resource.attributes)) for span in scope.spans]
        else:
            assert path == "/v1/logs"
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                for scope in resource.scope_logs:
                    self.logs += [_log(record) for record in scope.log_records]
        return None


def _span(span: Any, resource: dict[str, Any]) -> dict[str, Any]:
    return {
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "name": span.name,
        "kind": span.kind,
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "status": (span.status.code, span.status.message),
        "attributes": _plain(span.attributes),
        "resource": resource,
    }


def _log(record: Any) -> dict[str, Any]:
    return {
        "trace": record.trace_id.hex(),
        "span": record.span_id.hex(),
        "event": record.event_name,
        "at_ns": record.time_unix_nano,
        "attributes": _plain(record.attributes),
    }


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.headers.append({key.lower(): value for key, value in self.headers.items()})
            whole = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
            told = collector.take(self.path, whole) if collector.status == 200 else None
            answer = b"" if told is None else json.dumps(told).encode()
            self.send_response(collector.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    collector.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
