"""A local server that speaks the formats of LiteLLM's providers, whole and streamed. Each answer is `Hello there!`."""

from __future__ import annotations

import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.other_providers import TEXTS, anthropic, gemini
from tests.support.servers import chunks, completion

TEXT = "".join(TEXTS)
USAGE = {"input_tokens": 3, "output_tokens": 3, "tokens": {"input_tokens": 3, "output_tokens": 3}}

Body = dict[str, Any]


def lines(*events: Any) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def events(*found: Any) -> bytes:
    return b"".join(
        (f"event: {each['type']}\n" if "type" in each else "").encode() + f"data: {json.dumps(each)}\n\n".encode()
        for each in found
    )


def chat(body: Body, stream: bool) -> bytes:
    body = {"model": "m", **body}
    # Groq names the tier, and LiteLLM relies on it.
    return b"".join(chunks(body)) if stream else json.dumps(completion(body, service_tier="default")).encode()


def ollama_chat(body: Body, stream: bool) -> bytes:
    def part(text: str, **more: Any) -> Body:
        message = {"role": "assistant", "content": text}
        return {"model": "m", "created_at": "2026-01-01T00:00:00Z", "message": message} | more

    end = {"done": True, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 3}
    return lines(*(part(text, done=False) for text in TEXTS), part("", **end)) if stream else lines(part(TEXT, **end))


def ollama_generate(body: Body, stream: bool) -> bytes:
    def part(text: str, **more: Any) -> Body:
        return {"model": "m", "created_at": "2026-01-01T00:00:00Z", "response": text} | more

    end = {"done": True, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 3}
    return lines(*(part(text, done=False) for text in TEXTS), part("", **end)) if stream else lines(part(TEXT, **end))


def cohere(body: Body, stream: bool) -> bytes:
    """Version 2."""
    end = {"finish_reason": "COMPLETE", "usage": USAGE}
    if not stream:
        message = {"role": "assistant", "content": [{"type": "text", "text": TEXT}]}
        return json.dumps({"id": "c", "message": message} | end).encode()
    parts = [{"type": "content-delta", "delta": {"message": {"content": {"text": text}}}} for text in TEXTS]
    # LiteLLM reads each line as an event.
    return lines({"type": "message-start", "id": "c"}, *parts, {"type": "message-end", "delta": end})


def converse(body: Body, stream: bool) -> bytes:
    """Bedrock's; its stream is binary."""
    usage = {"inputTokens": 3, "outputTokens": 3, "totalTokens": 6}
    more = {"usage": usage, "metrics": {"latencyMs": 1}}
    if stream:
        parts = [("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": text}}) for text in TEXTS]
        begun, ended = ("messageStart", {"role": "assistant"}), ("messageStop", {"stopReason": "end_turn"})
        return b"".join(framed(*event) for event in (begun, *parts, ended, ("metadata", more)))
    message = {"role": "assistant", "content": [{"text": TEXT}]}
    return json.dumps({"output": {"message": message}, "stopReason": "end_turn"} | more).encode()


def framed(kind: str, payload: Body) -> bytes:
    """One event of `application/vnd.amazon.eventstream`: lengths, their checksum, headers, payload, checksum of all."""
    known = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    headers = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in known.items()
    )
    body = json.dumps(payload).encode()
    start = struct.pack(">II", len(headers) + len(body) + 16, len(headers))
    frame = start + struct.pack(">I", zlib.crc32(start)) + headers + body
    return frame + struct.pack(">I", zlib.crc32(frame))


def cloudflare(body: Body, stream: bool) -> bytes:
    if not stream:
        return json.dumps({"result": {"response": TEXT}, "success": True}).encode()
    return events(*({"response": text} for text in TEXTS)) + b"data: [DONE]\n\n"


def as_anthropic(body: Body, stream: bool) -> bytes:
    return events(*anthropic(True)) if stream else json.dumps(anthropic(False)[0]).encode()


def as_gemini(body: Body, stream: bool) -> bytes:
    return events(*gemini(True)) if stream else json.dumps(gemini(False)[0]).encode()


FORMATS: tuple[tuple[str, Any], ...] = (
    (r"/chat/completions|/ml/v1/text/chat(_stream)?|/serving-endpoints/.*|/invocations", chat),
    (r"/v1/messages", as_anthropic),
    (r":(streamG|g)enerateContent", as_gemini),
    (r"/api/chat", ollama_chat),
    (r"/api/generate", ollama_generate),
    (r"/api/show", lambda *_: b"{}"),
    (r"/v2/chat", cohere),
    (r"/converse(-stream)?", converse),
    (r"/cloudflare/.*", cloudflare),
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        path = self.path.partition("?")[0]
        stream = bool(body.get("stream")) or "stream" in path
        speak = next((each for pattern, each in FORMATS if re.search(f"({pattern})$", path)), None)
        self.server.__dict__["paths"].append(path)
        text = b'{"error": "unknown"}' if speak is None else speak(body, stream)
        self.send_response(404 if speak is None else 200)
        kind = "application/x-ndjson" if "/api/" in path else "text/event-stream"
        self.send_header("content-type", kind if stream else "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def speaking() -> Iterator[tuple[str, list[str]]]:
    """Serve; the address, and the paths that were asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    paths = server.__dict__["paths"] = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
