"""The server that the benchmark's clients talk to: as little work as possible, the same for everybody.

One process, one event loop, one port, so that a difference between two clients is never a difference between two
servers: `/v1` answers like the provider, `/engine/v1` like vLLM serving `CHAMPION` (token ids and log-probabilities in
every answer and chunk), and `/held-N/v1` streams like the provider but sends what follows the first chunk only when N
streams are open, in slices to one after the other. Every byte that is sent was made before the first request came.

`python -m tests.benchmarks.stub` prints its port and serves until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
from typing import Any

MODEL = "gpt-x"
CHAMPION = "bench@0"
ANSWER_TOKENS = 60
STREAM_CHUNKS = 200
HELD_CHUNKS = 50
HELD_SLICE = 5
MOST_CONNECTIONS = 10_000

ASK: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0.7,
    "messages": [
        {"role": "system", "content": "You help customers of a small shop. " * 12},
        {"role": "user", "content": "Where is my parcel? I ordered two weeks ago. " * 4},
        {"role": "assistant", "content": "I am sorry to hear that. What is the number of your order?"},
        {"role": "user", "content": "It is 4711, and I would like to have it before Friday."},
    ],
}
"""What every client asks, again and again."""

_PROMPT_IDS = list(range(1000, 1180))


def _word(position: int) -> str:
    return f" word{position % 10}"


def _logprob(position: int) -> dict[str, Any]:
    return {"token": _word(position), "logprob": -0.125 * (position % 7), "bytes": [32, 119], "top_logprobs": []}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 180, "completion_tokens": tokens, "total_tokens": 180 + tokens}


def answer(engine: bool) -> bytes:
    """The body of an unstreamed answer, of the engine or of the provider."""
    tokens = range(ANSWER_TOKENS)
    message = {"role": "assistant", "content": "".join(map(_word, tokens)), "refusal": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "choices": [choice]}
    body |= {"model": CHAMPION if engine else MODEL, "usage": _usage(ANSWER_TOKENS)}
    if engine:
        choice["logprobs"] = {"content": list(map(_logprob, tokens))}
        choice["token_ids"] = list(tokens)
        body["prompt_token_ids"] = _PROMPT_IDS
    return json.dumps(body, separators=(",", ":")).encode()


def _whole(engine: bool) -> bytes:
    sent = answer(engine)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    return head.encode() + sent


def _events(chunks: int, engine: bool) -> list[bytes]:
    """The parts of a streamed answer, framed for HTTP: head and first chunk, the other chunks, the end."""
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
    frame["model"] = CHAMPION if engine else MODEL
    events: list[bytes] = []
    for position in range(chunks):
        delta: dict[str, Any] = {"content": _word(position)} if position else {"role": "assistant", "content": ""}
        finish = "stop" if position == chunks - 1 else None
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        more: dict[str, Any] = {}
        if engine:
            choice |= {"logprobs": {"content": [_logprob(position)]}, "token_ids": [position]} if position else {}
            more = {} if position else {"prompt_token_ids": _PROMPT_IDS}
        events.append(b"data: " + json.dumps(frame | {"choices": [choice]} | more).encode() + b"\n\n")
    framed = [b"%x\r\n%s\r\n" % (len(event), event) for event in [*events, b"data: [DONE]\n\n"]]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head + framed[0], *framed[1:], b"0\r\n\r\n"]


_WHOLE = {engine: _whole(engine) for engine in (False, True)}
_STREAM = {engine: b"".join(_events(STREAM_CHUNKS, engine)) for engine in (False, True)}
_HELD_FIRST, *_HELD_REST = _events(HELD_CHUNKS, False)
_HELD_SLICES = [b"".join(_HELD_REST[at : at + HELD_SLICE]) for at in range(0, len(_HELD_REST), HELD_SLICE)]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_HELD = re.compile(rb" /held-(\d+)/")
_STREAMED = re.compile(rb'"stream": ?true')


class _Connection(asyncio.Protocol):
    held: list[asyncio.Transport] = []  # noqa: RUF012 - one list for all connections

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport  # asyncio has set TCP_NODELAY

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        length = _LENGTH.search(self._buffer, 0, head_end)
        end = head_end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < end:
            return
        request, self._buffer = self._buffer[:end], self._buffer[end:]
        self._answer(request)

    def _answer(self, request: bytes) -> None:
        engine = request.startswith(b"POST /engine/")
        if not _STREAMED.search(request):
            self._transport.write(_WHOLE[engine])
            return
        held = _HELD.search(request, 0, 40)
        if held is None:
            self._transport.write(_STREAM[engine])
            return
        self._transport.write(_HELD_FIRST)
        self.held.append(self._transport)
        if len(self.held) == int(held[1]):
            _send_slices(self.held.copy(), 0)
            self.held.clear()


def _send_slices(transports: list[asyncio.Transport], at: int) -> None:
    if at < len(_HELD_SLICES):
        for transport in transports:
            transport.write(_HELD_SLICES[at])
        asyncio.get_running_loop().call_soon(_send_slices, transports, at + 1)


def allow_connections(n: int) -> None:
    """Let this process have `n` connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 200
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(f"{n} connections need {wanted} open files, and the limit is {hard}: raise it (ulimit -Hn)")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve() -> None:
    """Serve until standard input is closed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Connection, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    allow_connections(MOST_CONNECTIONS)
    asyncio.run(serve())
