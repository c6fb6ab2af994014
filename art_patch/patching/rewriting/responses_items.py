"""Items of a Responses answer, made of a chat answer. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, cast

from art_patch.patching.rewriting.response_rewriter import InvalidAnswer
from art_patch.types import JSON

# Finish reason of chat -> why the response is incomplete, in the words of this API; `None` if it is complete.
_WHY_INCOMPLETE = {
    "stop": None,
    "tool_calls": None,
    "function_call": None,
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


def why_incomplete(reason: Any) -> str | None:
    """Return what a finish reason of chat says about a response; `None` if the response is complete.

    Raises:
        InvalidAnswer: if it is no reason that we know.
    """
    if not isinstance(reason, str) or reason not in _WHY_INCOMPLETE:
        raise InvalidAnswer("it ended for a reason that we do not know")
    return _WHY_INCOMPLETE[reason]


def finish(response: dict[str, Any], items: list[JSON], why: str | None, usage: Any) -> None:
    """Complete a response.

    Args:
        response: as `ResponsesRewriter.begun` returned it.
        items: its output.
        why: why it is incomplete.
        usage: the engine's.
    """
    response["status"] = "completed" if why is None else "incomplete"
    response["incomplete_details"] = None if why is None else {"reason": why}
    response["output"] = items
    response["usage"] = _usage(usage)


def statuses(count: int, why: str | None) -> list[str]:
    """Return the status of each of `count` items: what ends too early is the last one."""
    return ["completed"] * (count - 1) + ["completed" if why is None else "incomplete"]


def output(message: Mapping[str, Any], why: str | None) -> list[JSON]:
    """Return the output items of an assistant message.

    Raises:
        InvalidAnswer: if the message is none.
    """
    content, refusal, calls = message.get("content"), message.get("refusal"), message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(refusal, str | None) or not isinstance(calls, list):
        raise InvalidAnswer("its message is of another kind than we know")
    parts: list[JSON] = []
    if content or not (refusal or calls):
        parts.append(text_part(content or ""))
    if refusal:
        parts.append(refusal_part(refusal))
    found = [call_of(call) for call in cast(list[Any], calls)]
    status = iter(statuses(bool(parts) + len(found), why))
    items: list[JSON] = []
    if parts:
        items.append(message_item(new_item_id("msg"), parts, next(status)))
    return items + [call_item(new_item_id("fc"), *call, next(status)) for call in found]


def call_of(call: Any) -> tuple[str, str, str]:
    """Return id, name and arguments of a tool call in a chat message.

    Raises:
        InvalidAnswer: if it is none.
    """
    given: dict[str, Any] = cast(dict[str, Any], call) if isinstance(call, dict) else {}
    function: Any = given.get("function")
    named: dict[str, Any] = cast(dict[str, Any], function) if isinstance(function, dict) else {}
    call_id, name, arguments = given.get("id"), named.get("name"), named.get("arguments")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidAnswer("a tool call is of another kind than we know")
    return call_id, name, arguments


# The shapes of this API.


def new_item_id(kind: str) -> str:
    """Return a new id; the API insists on the prefix when an item is sent back."""
    return f"{kind}_{uuid.uuid4().hex}"


def text_part(text: str) -> JSON:
    """Return a text of a message."""
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def refusal_part(text: str) -> JSON:
    """Return a refusal of a message."""
    return {"type": "refusal", "refusal": text}


def message_item(item_id: str, parts: list[JSON], status: str) -> JSON:
    """Return a message."""
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": parts}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> JSON:
    """Return a function call."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def _usage(usage: Any) -> JSON:
    given: dict[str, Any] = cast(dict[str, Any], usage) if isinstance(usage, dict) else {}
    read, written = _count(given, "prompt_tokens"), _count(given, "completion_tokens")
    cached = _count(given.get("prompt_tokens_details"), "cached_tokens")
    thought = _count(given.get("completion_tokens_details"), "reasoning_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": read + written,
    }


def _count(usage: Any, key: str) -> int:
    value = cast(dict[str, Any], usage).get(key) if isinstance(usage, dict) else None
    return value if isinstance(value, int) else 0
