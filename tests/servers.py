"""An OpenAI-compatible server that does what a test tells it, over real HTTP, and remembers what it was sent.

Without a script it answers like vLLM would: the model that was asked, and token ids with log-probabilities if the
request wants them. `will()` queues answers for the next requests.
"""

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

TEXT = ("Hello", " there", "!")
PROMPT_IDS = [1, 2, 3]


@dataclass
class Seen:
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any

    def __str__(self) -> str:
        return json.dumps([self.path, self.headers, self.body])


@dataclass
class Answer:
    """What to send back.

    Attributes:
        status: HTTP status.
        body: sent as it is.
        events: sent as server-sent events instead of `body`.
        headers: in addition.
        hang: send nothing until the server is closed.
        cut: close the connection in the middle of the body.
        gate: after the first event, wait for this before sending the next.
    """

    status: int = 200
    body: bytes = b""
    events: Sequence[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    cut: bool = False
    gate: threading.Event | None = None


def completion(body: Any, *, content: str | None = None, finish: str | None = "stop", **changes: Any) -> dict[str, Any]:
    """The chat completion for a request body."""
    exact = bool(body.get("return_token_ids"))
    choices = []
    for index in range(body.get("n") or 1):
        message: dict[str, Any] = {"role": "assistant", "content": content or "".join(TEXT), "refusal": None}
        if body.get("tools"):
            message |= {"content": None, "tool_calls": [TOOL_CALL]}
        choice = {"index": index, "message": message, "finish_reason": finish, "logprobs": None}
        if body.get("tools") and finish == "stop":
            choice["finish_reason"] = "tool_calls"
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [_logprob(word) for word in TEXT]}
        if exact:
            choice["token_ids"] = [10 + index, 11, 12]
        choices.append(choice)
    count = len(TEXT) * len(choices)
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": count, "total_tokens": count + len(PROMPT_IDS)}
    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"], "choices": choices}
    whole |= {"usage": usage, **({"prompt_token_ids": PROMPT_IDS} if exact else {})}
    return whole | changes


TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


def _logprob(word: str) -> dict[str, Any]:
    return {"token": word, "logprob": -0.25, "bytes": None, "top_logprobs": []}


def chunks(body: Any, *, finish: str | None = "stop", done: bool = True) -> list[bytes]:
    """The events of a streamed chat completion for a request body."""
    exact, wants = bool(body.get("return_token_ids")), bool(body.get("logprobs"))
    n = body.get("n") or 1
    events: list[dict[str, Any]] = []

    def add(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> None:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason} | more
        events.append({"choices": [choice]})

    for index in range(n):
        add(index, {"role": "assistant", "content": ""})
        if exact:
            events[-1]["prompt_token_ids"] = PROMPT_IDS
    for position, word in enumerate(TEXT):
        for index in range(n):
            more: dict[str, Any] = {"logprobs": {"content": [_logprob(word)]}} if wants else {}
            if exact:
                more["token_ids"] = [10 + index if position == 0 else 10 + position]
            delta = {"content": word}
            if body.get("tools"):
                whole = TOOL_CALL["function"]["arguments"]
                part = {"index": 0, "function": {"arguments": (whole[:5], whole[5:9], whole[9:])[position]}}
                delta = {"tool_calls": [part]}
                if position == 0:
                    part |= {"id": TOOL_CALL["id"], "type": "function"}
                    part["function"]["name"] = TOOL_CALL["function"]["name"]
            add(index, delta, **more)
    if finish is not None:
        for index in range(n):
            add(index, {}, "tool_calls" if body.get("tools") else finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        count = len(TEXT) * n
        usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": count, "total_tokens": 3 + count}
        events.append({"choices": [], "usage": usage})
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    out = [b"data: " + json.dumps(frame | event).encode() + b"\n\n" for event in events]
    return [*out, b"data: [DONE]\n\n"] if done else out


def error(status: int, message: str = "no") -> Answer:
    """An error as OpenAI writes it."""
    return Answer(status, json.dumps({"error": {"message": message, "type": "t", "code": None}}).encode())


class StubServer:
    """See the module."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.script: deque[Answer] = deque()
        self.always: Answer | None = None
        self.released = threading.Event()
        self._http = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def will(self, *answers: Answer) -> None:
        """Give these answers to the next requests."""
        self.script.extend(answers)

    def answer(self, body: Any) -> Answer:
        """The answer to a request."""
        if self.script:
            return self.script.popleft()
        if self.always is not None:
            return self.always
        if body.get("stream"):
            return Answer(events=chunks(body))
        if "messages" not in body:
            return Answer(body=b'{"object": "list", "data": [], "model": "e"}')
        return Answer(body=json.dumps(completion(body)).encode())

    def reset(self) -> None:
        """Let hanging requests go and forget what was sent and scripted."""
        self.released.set()
        self.released = threading.Event()
        self.seen, self.script, self.always = [], deque(), None

    def close(self) -> None:
        """Let hanging requests go and stop."""
        self.released.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the game."""


def _handler(stub: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(Answer(body=b'{"object": "list", "data": []}'), None)

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.loads(raw)
            headers = {key.lower(): value for key, value in self.headers.items()}
            stub.seen.append(Seen(self.path, headers, body))
            self._reply(stub.answer(body), body)

        def _reply(self, answer: Answer, body: Any) -> None:
            if answer.hang:
                stub.released.wait(30)
                self.close_connection = True
                return
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value)
            if answer.events is None:
                self.send_header("content-type", answer.headers.get("content-type", "application/json"))
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body[: len(answer.body) // 2] if answer.cut else answer.body)
            else:
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for position, event in enumerate(answer.events):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                    self.wfile.flush()
                    if position == 0 and answer.gate is not None:
                        answer.gate.wait(30)
                if not answer.cut:
                    self.wfile.write(b"0\r\n\r\n")
            if answer.cut:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


@contextmanager
def serving() -> Iterator[StubServer]:
    """A running stub."""
    server = StubServer()
    try:
        yield server
    finally:
        server.close()
