"""A stand-in for Anthropic's Messages API and Gemini's generateContent, whole and streamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXTS = ("Hello ", "there!")


def anthropic(stream: bool) -> list[dict[str, Any]]:
    """The answer, or the events of its stream."""
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude"}
    if not stream:
        content = [{"type": "text", "text": "".join(TEXTS)}]
        usage = {"input_tokens": 3, "output_tokens": 3}
        return [message | {"content": content, "stop_reason": "end_turn", "usage": usage}]
    begun = message | {"content": [], "stop_reason": None, "usage": {"input_tokens": 3, "output_tokens": 1}}
    return [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in TEXTS),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]


def gemini(stream: bool) -> list[dict[str, Any]]:
    """The answer, or the parts of its stream."""
    usage = {"promptTokenCount": 3, "candidatesTokenCount": 3, "totalTokenCount": 6}

    def part(text: str, **end: str) -> dict[str, Any]:
        content = {"role": "model", "parts": [{"text": text}]}
        return {"candidates": [{"content": content, "index": 0, **end}], "usageMetadata": usage}

    if not stream:
        return [part("".join(TEXTS), finishReason="STOP")]
    return [part(TEXTS[0]), part(TEXTS[1], finishReason="STOP")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.__dict__["paths"].append(self.path.partition("?")[0])
        stream = bool(body.get("stream")) or "streamGenerateContent" in self.path
        answer = (anthropic if self.path.endswith("/v1/messages") else gemini)(stream)
        text = json.dumps(answer[0])
        if stream:
            events = ((f"event: {each['type']}\r\n" if "type" in each else "", json.dumps(each)) for each in answer)
            text = "".join(f"{event}data: {data}\r\n\r\n" for event, data in events)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if stream else "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving_others() -> Iterator[tuple[str, list[str]]]:
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
