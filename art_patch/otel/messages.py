"""Messages of a call in the words of OpenTelemetry's GenAI conventions: a role, and parts of several types. Pure."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from art_patch._lib.loose_json import as_object, objects
from art_patch.types import JSON, Call


def input_messages(call: Call) -> list[JSON]:
    """Return the prompt, system messages included."""
    return [{"role": message.get("role"), "parts": _parts(message)} for message in call.messages]


def output_messages(call: Call) -> list[JSON]:
    """Return the choices."""
    return [
        {
            "role": choice.message.get("role", "assistant"),
            "parts": _parts(choice.message),
            "finish_reason": choice.finish_reason,
        }
        for choice in call.choices
    ]


def _parts(message: JSON) -> list[JSON]:
    content: Any = message.get("content")
    if message.get("role") == "tool":
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    parts: list[JSON] = [{"type": "reasoning", "content": reasoning}] if isinstance(reasoning, str) else []
    if isinstance(content, str):
        parts.append({"type": "text", "content": content})
    else:
        parts += map(_part, objects(content))
    if isinstance(message.get("refusal"), str):
        parts.append({"type": "refusal", "content": message["refusal"]})
    parts += map(_tool_call, objects(message.get("tool_calls")))
    return parts


def _part(part: JSON) -> JSON:
    if isinstance(part.get("text"), str):
        return {"type": "text", "content": part["text"]}
    address = as_object(part.get("image_url")).get("url")
    if isinstance(address, str) and not address.startswith("data:"):
        return {"type": "uri", "modality": "image", "uri": address}
    return {"type": part.get("type")}  # media: megabytes do not belong on a span


def _tool_call(call: JSON) -> JSON:
    function = as_object(call.get("function"))
    arguments: Any = function.get("arguments")
    with suppress(TypeError, ValueError, RecursionError):  # a model may write anything
        arguments = json.loads(arguments)
    return {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
