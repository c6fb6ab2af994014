"""Makes the output items of a Responses object from the engine's chat answer. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, cast

from art_patch._lib.loose_json import as_count, as_object
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer
from art_patch.types import JSON

# Finish reason of chat -> why the response is incomplete; `None` if it is complete.
_WHY_INCOMPLETE = {
    "stop": None,
    "tool_calls": None,
    "function_call": None,
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


def why_incomplete(reason: Any) -> str | None:
    """Return the Responses API's reason of an incomplete response for a finish reason of chat; `None` if complete."""
    if not isinstance(reason, str) or reason not in _WHY_INCOMPLETE:
        raise InvalidAnswer("it ended for a reason that we do not know")
    return _WHY_INCOMPLETE[reason]


def finish(response: dict[str, Any], items: list[JSON], why: str | None, usage: Any) -> None:
    """Set items, status and usage of a response. `why`: from `why_incomplete`; `usage`: that of the chat answer."""
    response["status"] = "completed" if why is None else "incomplete"
    response["incomplete_details"] = None if why is None else {"reason": why}
    response["output"] = items
    response["usage"] = _usage(as_object(usage))


def statuses(count: int, why: str | None) -> list[str]:
    """Return the status of each of `count` items: all complete, except the final one if `why` is given."""
    return ["completed"] * (count - 1) + ["completed" if why is None else "incomplete"]


def output(message: Mapping[str, Any], why: str | None) -> list[JSON]:
    """Return the Responses output items (message, function calls) for an assistant message of chat."""
    content, refusal, calls = message.get("content"), message.get("refusal"), message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(refusal, str | None) or not isinstance(calls, list):
        raise InvalidAnswer("its message is of another kind than we know")
    parts: list[JSON] = []
    if content or not (refusal or calls):  # an answer without a word is a message all the same
        parts.append(text_part(content or ""))
    if refusal:
        parts.append(refusal_part(refusal))
    found = [_call_of(as_object(call)) for call in cast(list[Any], calls)]
    status = iter(statuses(bool(parts) + len(found), why))
    items: list[JSON] = []
    if parts:
        items.append(message_item(new_item_id("msg"), parts, next(status)))
    return items + [call_item(new_item_id("fc"), *call, next(status)) for call in found]


def _call_of(call: dict[str, Any]) -> tuple[str, str, str]:
    """Return id, name and arguments of a tool call."""
    function = as_object(call.get("function"))
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidAnswer("a tool call is of another kind than we know")
    return call_id, name, arguments


def new_item_id(kind: str) -> str:
    """Return a new id for an item. Its prefix shows the kind: the API checks it when a client sends the item back."""
    return f"{kind}_{uuid.uuid4().hex}"


def text_part(text: str) -> JSON:
    """Return a content part that holds text, for a message item."""
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}


def refusal_part(text: str) -> JSON:
    """Return a content part that holds a refusal, for a message item."""
    return {"type": "refusal", "refusal": text}


def message_item(item_id: str, parts: list[JSON], status: str) -> JSON:
    """Return an output item that is a message of the assistant with these content parts."""
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": parts}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> JSON:
    """Return an output item that is a call of a function."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **call}


def _usage(usage: dict[str, Any]) -> JSON:
    def count(given: Any, key: str) -> int:
        return as_count(as_object(given).get(key)) or 0

    read, written = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    cached = count(usage.get("prompt_tokens_details"), "cached_tokens")
    thought = count(usage.get("completion_tokens_details"), "reasoning_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": read + written,
    }
