"""An OpenAI-compatible server that does what a test tells it, over real HTTP, and remembers what it was sent.

Without a script it answers like vLLM would: the model that was asked, and token ids with log-probabilities if the
request wants them. `will()` queues answers for the next requests.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TEXT = ("Hello", " there", "!")
PROMPT_IDS = [1, 2, 3]


@dataclass
class ReceivedRequest:
    """One request."""

    path: str
    headers: dict[str, str]
    body: Any

    def __str__(self) -> str:
        return json.dumps([self.path, self.headers, self.body], default=repr)


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
        gate: after `gate_after` events, wait for this before sending the next.
        gate_after: see `gate`; an answer of the engine's is held back up to its second event, the first with a word.
    """

    status: int = 200
    body: bytes = b""
    events: Sequence[bytes] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    cut: bool = False
    gate: threading.Event | None = None
    gate_after: int = 1


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


# The other surfaces, as OpenAI answers them.

RESPONSE_CALL = {
    "id": "fc_1",
    "type": "function_call",
    "status": "completed",
    "call_id": "call_1",
    "name": "look",
    "arguments": '{"at": "sky"}',
}


def response_items(body: Any) -> list[dict[str, Any]]:
    """The output items for a Responses request: a message, or a function call if there are tools."""
    if body.get("tools"):
        return [RESPONSE_CALL]
    part = {"type": "output_text", "text": "".join(TEXT), "annotations": [], "logprobs": []}
    return [{"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}]


def response(body: Any, **changes: Any) -> dict[str, Any]:
    """The response for a Responses request."""
    whole = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "model": body.get("model") or "gpt-template",
        "output": response_items(body),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
        "usage": {
            "input_tokens": len(PROMPT_IDS),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(TEXT),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(PROMPT_IDS) + len(TEXT),
        },
    }
    return whole | changes


def response_events(body: Any, **changes: Any) -> list[bytes]:
    """The events of a streamed response."""
    whole, events = response(body, **changes), list[dict[str, Any]]()

    def add(kind: str, **fields: Any) -> None:
        events.append({"type": f"response.{kind}", "sequence_number": len(events), **fields})

    begun = whole | {"status": "in_progress", "output": [], "usage": None}
    add("created", response=begun)
    add("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            add("output_item.added", output_index=index, item=item | {"status": "in_progress", "arguments": ""})
            for start in range(0, len(item["arguments"]), 5):
                add("function_call_arguments.delta", **place, delta=item["arguments"][start : start + 5])
            add("function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        elif item["type"] == "message":
            add("output_item.added", output_index=index, item=item | {"status": "in_progress", "content": []})
            for number, part in enumerate(item["content"]):
                place["content_index"] = number
                add("content_part.added", **place, part=part | {"text": ""})
                for word in TEXT:
                    add("output_text.delta", **place, delta=word, logprobs=[])
                add("output_text.done", **place, text=part["text"], logprobs=[])
                add("content_part.done", **place, part=part)
        else:
            add("output_item.added", output_index=index, item=item)
        add("output_item.done", output_index=index, item=item)
    add(whole["status"], response=whole)
    return [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]


def text_completion(body: Any, **changes: Any) -> dict[str, Any]:
    """The legacy completion for a request body."""
    prompt = body.get("prompt")
    n = (body.get("n") or 1) * (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    choices = [{"index": index, "text": "".join(TEXT), "logprobs": None, "finish_reason": "stop"} for index in range(n)]
    count = len(TEXT) * n
    usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": count, "total_tokens": count + len(PROMPT_IDS)}
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
    return whole | {"choices": choices, "usage": usage} | changes


def text_chunks(body: Any) -> list[bytes]:
    """The events of a streamed legacy completion."""
    whole, out = text_completion(body), list[bytes]()
    usage = whole.pop("usage")
    for choice in whole["choices"]:
        for word in TEXT:
            part = choice | {"text": word, "finish_reason": "stop" if word == TEXT[-1] else None}
            out.append(b"data: " + json.dumps(whole | {"choices": [part]}).encode() + b"\n\n")
    if (body.get("stream_options") or {}).get("include_usage"):
        out.append(b"data: " + json.dumps(whole | {"choices": [], "usage": usage}).encode() + b"\n\n")
    return [*out, b"data: [DONE]\n\n"]


def error(status: int, message: str = "no") -> Answer:
    """An error as OpenAI writes it."""
    return Answer(status, json.dumps({"error": {"message": message, "type": "t", "code": None}}).encode())


class StubServer:
    """See the module."""

    def __init__(self) -> None:
        self.seen: list[ReceivedRequest] = []
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

    def answer(self, body: Any, path: str = "") -> Answer:
        """The answer to a request."""
        if self.script:
            return self.script.popleft()
        if self.always is not None:
            return self.always
        place = path.partition("?")[0]
        if place.endswith("/responses"):
            streamed = body.get("stream")
            return (
                Answer(events=response_events(body)) if streamed else Answer(body=json.dumps(response(body)).encode())
            )
        if place.endswith("/completions") and "prompt" in body:
            streamed = body.get("stream")
            whole = json.dumps(text_completion(body)).encode()
            return Answer(events=text_chunks(body)) if streamed else Answer(body=whole)
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
            body = json.loads(raw) if "json" in self.headers.get("content-type", "json") else raw
            headers = {key.lower(): value for key, value in self.headers.items()}
            stub.seen.append(ReceivedRequest(self.path, headers, body))
            self._reply(stub.answer(body, self.path), body)

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
                    if position + 1 == answer.gate_after and answer.gate is not None:
                        answer.gate.wait(30)
                if not answer.cut:
                    self.wfile.write(b"0\r\n\r\n")
            if answer.cut:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler


@contextmanager
def no_certificates(empty: Path) -> Iterator[None]:
    """Let an empty directory be all certificates of the machine, here and in what is started meanwhile.

    Each client of the SDK reads them, which costs more than most tests; only where nothing speaks TLS.
    """
    names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ["SSL_CERT_DIR"] = str(empty)
    try:
        yield
    finally:
        del os.environ["SSL_CERT_DIR"]
        os.environ.update(before)


@contextmanager
def serving() -> Iterator[StubServer]:
    """A running stub."""
    server = StubServer()
    try:
        yield server
    finally:
        server.close()
