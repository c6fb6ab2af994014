"""What Anthropic's Messages API is asked and answers, to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tests.proxy.provider import SSE, Reply

SECRET = "sk-ant-callers-own-secret"
USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 5}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "stop_sequence": None}
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
ASK: dict[str, Any] = {"model": "claude-x", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
THOUGHT = {"type": "thinking", "thinking": "The sky?", "signature": "c2lnbmF0dXJl"}
LOOKS = [
    THOUGHT,
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky", "n": [1, 2]}},
]


def whole(blocks: Iterable[dict[str, Any]], reason: str = "end_turn") -> Reply:
    body = MESSAGE | {"content": list(blocks), "stop_reason": reason, "usage": USAGE}
    headers = [("content-type", "application/json"), ("request-id", "req_1")]
    return Reply(headers=headers, body=json.dumps(body).encode())


def streamed(blocks: Iterable[dict[str, Any]], reason: str = "end_turn", *, cut: int | None = None) -> Reply:
    """A stream as the provider writes it. `cut`: only so many events, and then the connection breaks."""
    begun = MESSAGE | {"content": [], "stop_reason": None, "usage": USAGE | {"output_tokens": 1}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        place = {"index": index}
        if block["type"] == "text":
            start, field, text = block | {"text": ""}, "text", block["text"]
        elif block["type"] == "thinking":
            start, field, text = block | {"thinking": "", "signature": ""}, "thinking", block["thinking"]
        else:
            start, field, text = (
                block | {"input": {}},
                "partial_json",
                json.dumps(block["input"], separators=(",", ":")),
            )
        kind = {"partial_json": "input_json"}.get(field, field) + "_delta"
        events.append({"type": "content_block_start", **place, "content_block": start})
        for part in (text[:3], text[3:]):
            events.append({"type": "content_block_delta", **place, "delta": {"type": kind, field: part}})
        if "signature" in block:
            delta = {"type": "signature_delta", "signature": block["signature"]}
            events.append({"type": "content_block_delta", **place, "delta": delta})
        events.append({"type": "content_block_stop", **place})
    delta = {"stop_reason": reason, "stop_sequence": None}
    events += [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 5}}, {"type": "message_stop"}]
    pieces = [f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events]
    return Reply(headers=[*SSE, ("request-id", "req_2")], body=pieces[:cut], cut=cut is not None)


def refused(status: int, kind: str) -> Reply:
    body = {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_3"}
    headers = [("content-type", "application/json"), ("request-id", "req_3")]
    return Reply(status, headers, json.dumps(body).encode())
