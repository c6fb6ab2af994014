"""Turns calls and trajectories into span attributes of OpenTelemetry's conventions for generative AI (`gen_ai.*`).

https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from art_patch._lib.loose_json import as_object, objects
from art_patch.types import JSON, Api, Call, TrajectoryInfo

# Names are written out and not imported, because the conventions moved package three times. Ours begin with `art.`.
_REQUEST: Mapping[str, tuple[str, type]] = {
    "frequency_penalty": ("frequency_penalty", float),
    "max_completion_tokens": ("max_tokens", int),
    "max_tokens": ("max_tokens", int),
    "presence_penalty": ("presence_penalty", float),
    "seed": ("seed", int),
    "temperature": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
}


def operation_of(api: Api) -> str:
    """Return the value of the attribute `gen_ai.operation.name` for the API that was called."""
    return "text_completion" if api == "completions" else "chat"


def _request_attributes(params: JSON) -> dict[str, Any]:
    """Return the attributes of a call's sampling parameters."""
    found: dict[str, Any] = {}
    for name, (attribute, kind) in _REQUEST.items():
        value = params.get(name)
        # The app may have sent anything, and OpenTelemetry warns about each value of a wrong type.
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[f"gen_ai.request.{attribute}"] = kind(value)
    n, stop = params.get("n"), params.get("stop")
    if isinstance(n, int) and n != 1:
        # The conventions want this attribute only if it is not 1.
        found["gen_ai.request.choice.count"] = n
    if isinstance(stop, str | list):
        found["gen_ai.request.stop_sequences"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    return found


def call_attributes(call: Call, info: TrajectoryInfo) -> dict[str, Any]:
    """Return the attributes of a call's span, without its texts; an attribute without a value is `None`."""
    return {
        "gen_ai.operation.name": operation_of(call.api),
        "gen_ai.request.model": call.requested_model,
        "gen_ai.response.model": call.policy or (call.answered_by or "").partition(" ")[0] or None,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in call.choices if one.finish_reason],
        "gen_ai.response.time_to_first_chunk": None if call.ttft_ms is None else call.ttft_ms / 1000,
        # No usage is recorded as 0, and an attribute of 0 would say that the call was free.
        "gen_ai.usage.input_tokens": call.prompt_tokens or None,
        "gen_ai.usage.output_tokens": call.completion_tokens or None,
        **_request_attributes(call.params),
        **trajectory_attributes(info),
        "art.span.id": call.span_id,
        "art.call.id": call.id,
        "art.served_by": call.policy or "upstream",
        "art.fallback": call.fallback,
        "art.status": None if call.status in ("ok", "error") else call.status,
        "error.type": error_type(call.error or "") if call.status == "error" else None,
    }


def content_attributes(call: Call) -> dict[str, Any]:
    """Return the span attributes for the prompt, the answers and the tools of a call, each as a JSON text."""
    return {
        "gen_ai.input.messages": as_json(input_messages(call)),
        "gen_ai.output.messages": as_json(output_messages(call)),
        "gen_ai.tool.definitions": as_json(call.tools) if call.tools else None,
    }


def without_empty(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `attributes` without those that are `None` or empty, because OpenTelemetry warns about each `None`."""
    return {key: value for key, value in attributes.items() if value not in (None, "", [])}


def as_json(value: Any) -> str:
    """Return a value as a JSON text, because the value of an OpenTelemetry attribute cannot be an object."""
    return json.dumps(value, ensure_ascii=False, default=repr)


def trajectory_attributes(info: TrajectoryInfo) -> dict[str, Any]:
    """Return the span attributes with the ids of a call's trajectory and of its session, scenario and group."""
    found = {
        "gen_ai.conversation.id": info.session_id,
        "art.trajectory.id": info.id,
        "art.scenario.id": info.scenario_key,
        "art.group.id": info.group_key,
    }
    return {key: value for key, value in found.items() if value is not None}


def error_type(error: str) -> str:
    """Return the class name of an error text `Class: message`; `_OTHER` if the text does not begin with one."""
    # Records keep errors as `Class: message`.
    name = error.partition(":")[0]
    return name if name.isidentifier() else "_OTHER"


def input_messages(call: Call) -> list[JSON]:
    """Return the messages of a call's prompt in the format of the conventions: each has a role and typed parts."""
    return [{"role": message.get("role"), "parts": _parts(message)} for message in call.messages]


def output_messages(call: Call) -> list[JSON]:
    """Return a call's answers in the format of the conventions: each has a role, typed parts and a finish reason."""
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
        # The conventions describe the answer of a tool as a part of its own, not as a message with text.
        return [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}]
    # vLLM has named this field both ways.
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
    # An address is kept; a picture inside of the address (`data:`) is not.
    address = as_object(part.get("image_url")).get("url")
    if isinstance(address, str) and not address.startswith("data:"):
        return {"type": "uri", "modality": "image", "uri": address}
    return {"type": part.get("type")}  # media is left out: a span is no place for megabytes


def _tool_call(call: JSON) -> JSON:
    function = as_object(call.get("function"))
    arguments: Any = function.get("arguments")
    with suppress(TypeError, ValueError, RecursionError):  # the arguments are what the model wrote, valid or not
        arguments = json.loads(arguments)
    return {"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": arguments}
