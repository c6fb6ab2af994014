"""A provider that keeps every request to the byte, and answers what a test tells it, to the byte."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.servers import chunks, completion


@dataclass
class Got:
    """One request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    @property
    def names(self) -> set[str]:
        return {key.lower() for key, _ in self.headers}


@dataclass
class Reply:
    """What to send back.

    Attributes:
        status: HTTP status.
        headers: as they are, besides the framing.
        body: sent whole; in pieces, chunked, if it is a list.
        cut: close the connection before the end of a body in pieces.
        gate: wait for this after the first piece.
        hang: answer nothing until the test is over.
    """

    status: int = 200
    headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),)
    body: bytes | Sequence[bytes] = b"{}"
    cut: bool = False
    gate: threading.Event | None = None
    hang: bool = False


SSE = (("content-type", "text/event-stream; charset=utf-8"),)


@dataclass
class Provider:
    """See the module."""

    url: str
    got: list[Got] = field(default_factory=list)
    script: deque[Reply] = field(default_factory=deque)
    over: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a client went away from a hanging or gated request."""

    def will(self, *replies: Reply) -> None:
        self.script.extend(replies)

    def reset(self) -> None:
        self.over.set()
        self.over, self.left = threading.Event(), threading.Event()
        self.got, self.script = [], deque()

    def reply(self, got: Got) -> Reply:
        if self.script:
            return self.script.popleft()
        path = got.target.partition("?")[0]
        if path == "/v1/responses":
            return Reply(body=json.dumps(response(json.loads(got.body))).encode())
        if path == "/v1/completions":
            return Reply(body=json.dumps(text_completion(json.loads(got.body))).encode())
        if path == "/v1/chat/completions":
            body = json.loads(got.body)
            if body.get("stream"):
                return Reply(headers=SSE, body=chunks(body))
            return Reply(body=json.dumps(completion(body)).encode())
        return Reply(body=b'{"object": "list", "data": []}')


def response(body: Any) -> dict[str, Any]:
    """The answer of the Responses API."""
    text = {"type": "output_text", "text": "Hello there!", "annotations": []}
    message = {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    usage = {"input_tokens": 3, "output_tokens": 3, "total_tokens": 6}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    shape = {"id": "r1", "object": "response", "created_at": 1, "status": "completed", "model": body["model"]}
    rest = {"error": None, "incomplete_details": None, "instructions": None, "metadata": {}, "tools": []}
    rest |= {"parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "top_p": 1.0}
    return shape | rest | {"output": [message], "usage": usage | details}


def text_completion(body: Any) -> dict[str, Any]:
    """The answer of the legacy completions."""
    choice = {"index": 0, "text": "Hello there!", "finish_reason": "stop", "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    shape = {"id": "c1", "object": "text_completion", "created": 1, "model": body["model"]}
    return shape | {"choices": [choice], "usage": usage}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the game."""


def _handler(provider: Provider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _serve(self) -> None:
            got = Got(self.command, self.path, list(self.headers.items()), self._body())
            provider.got.append(got)
            reply = provider.reply(got)
            if reply.hang:
                self._wait(provider.over)
                self.close_connection = True
                return
            whole = isinstance(reply.body, bytes)
            self.send_response_only(reply.status)
            for name, value in reply.headers:
                self.send_header(name, value)
            framing = ("content-length", str(len(reply.body))) if whole else ("transfer-encoding", "chunked")
            self.send_header(*framing)
            self.end_headers()
            if whole:
                self.wfile.write(b"" if self.command == "HEAD" else reply.body)
                return
            for position, piece in enumerate(reply.body):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
                if position == 0 and reply.gate is not None:
                    self._wait(reply.gate)
            if reply.cut:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = _serve

        def _wait(self, event: threading.Event) -> None:
            """Wait for the event, or for the client to go away."""
            self.connection.settimeout(0.02)
            while not event.is_set() and not provider.over.is_set():
                try:
                    gone = not self.connection.recv(1, socket.MSG_PEEK)
                except TimeoutError:
                    continue
                except OSError:
                    gone = True
                if gone:
                    provider.left.set()
                    break
            self.connection.settimeout(None)

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts: list[bytes] = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

    return Handler


@contextmanager
def providing() -> Iterator[Provider]:
    """A running provider."""
    provider = Provider("")
    server = _Server(("127.0.0.1", 0), _handler(provider))
    provider.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield provider
    finally:
        provider.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
