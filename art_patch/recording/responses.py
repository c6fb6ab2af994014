"""Reads requests and answers of the Responses API as messages of chat completions.

An answer of the Responses API is a list of items, and the client sends these items back in its next request. All items
of the assistant that follow each other (texts, refusals, function calls, reasoning) become one assistant message here,
so that the message in the next request equals the recorded answer. Items without an equivalent in chat (calls of hosted
tools, references) are kept under the key `items` of that message. A reference to data that the provider stores
(`previous_response_id`, `conversation`, `prompt`) is kept among the parameters; the data itself is not recorded.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from art_patch._lib.loose_json import as_count, as_list, as_object, as_text, objects, parse_object
from art_patch.recording.chat import DONE, Answered, Asked, events, is_whole
from art_patch.types import JSON, Choice

# These request fields are the same in chat.
SAME_PARAMS = ("parallel_tool_calls", "temperature", "top_logprobs", "top_p")

# What is kept of a tool that the provider hosts. Its other fields may hold a key.
_PUBLIC_TOOL_FIELDS = ("type", "name", "description", "server_label")

_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


# The request.


def read_responses_request(request: dict[str, Any]) -> Asked:
    """Return the parsed request of a Responses call."""
    prompt, instructions = request.get("input"), request.get("instructions")
    found: list[JSON] = []
    if isinstance(instructions, str) and instructions:
        found.append({"role": "system", "content": instructions})
    if isinstance(prompt, str):
        found.append({"role": "user", "content": prompt})
    else:
        found += messages(objects(prompt))
    return Asked(messages=tuple(found), tools=tuple(map(_tool, objects(request.get("tools")))), params=_params(request))


def _tool(tool: dict[str, Any]) -> JSON:
    if tool.get("type") != "function":
        return {key: tool[key] for key in _PUBLIC_TOOL_FIELDS if key in tool}
    named = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in named if tool.get(key) is not None}}


def _params(request: dict[str, Any]) -> dict[str, Any]:
    text, reasoning = as_object(request.get("text")), as_object(request.get("reasoning"))
    params = {key: request.get(key) for key in SAME_PARAMS} | {
        "conversation": _reference(request.get("conversation")),
        "previous_response_id": _reference(request.get("previous_response_id")),
        "prompt": _reference(request.get("prompt")),
        "max_completion_tokens": request.get("max_output_tokens"),
        "reasoning_effort": reasoning.get("effort"),
        "response_format": _response_format(as_object(text.get("format"))),
        "tool_choice": _tool_choice(request.get("tool_choice")),
        "verbosity": text.get("verbosity"),
    }
    return {key: value for key, value in params.items() if value is not None}


def _reference(given: Any) -> str | None:
    """Return the id alone, because the variables of a prompt template may hold anything."""
    return as_text(as_object(given).get("id") or given) or None


def _response_format(given: dict[str, Any]) -> JSON | None:
    if given.get("type") == "json_schema":
        named = ("name", "description", "schema", "strict")
        return {"type": "json_schema", "json_schema": {key: given[key] for key in named if given.get(key) is not None}}
    return {"type": given["type"]} if given.get("type") == "json_object" else None


def _tool_choice(given: Any) -> Any:
    if isinstance(given, str):
        return given
    choice = as_object(given)
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"type": choice["type"]} if "type" in choice else None


# The answer.


def read_responses_answer(raw: bytes) -> Answered:
    """Return the parsed answer of a Responses call, from one JSON object or a stream of events."""
    response, done, error = (parse_object(raw), True, None) if is_whole(raw) else _assemble(events(raw))
    if response.get("status") == "failed":
        error = response.get("error") or error or "it failed"
    usage = as_object(response.get("usage"))
    return Answered(
        choices=_choices(response),
        done=done,
        error=error,
        model=as_text(response.get("model")) or None,
        fingerprint=as_text(response.get("system_fingerprint")) or None,
        prompt_tokens=as_count(usage.get("input_tokens")),
        completion_tokens=as_count(usage.get("output_tokens")),
    )


def _choices(response: dict[str, Any]) -> tuple[Choice, ...]:
    items = objects(response.get("output"))
    if not items:
        return ()
    message = answer_message(items)
    return (Choice(0, message, _finish_reason(response, message)),)


def _finish_reason(response: dict[str, Any], message: dict[str, Any]) -> str | None:
    status = response.get("status")
    if status == "completed":
        return "tool_calls" if message.get("tool_calls") else "stop"
    if status == "incomplete":
        reason = as_text(as_object(response.get("incomplete_details")).get("reason"))
        return _REASONS.get(reason, reason or None)
    return None


def _assemble(stream: Iterable[str]) -> tuple[dict[str, Any], bool, Any]:
    """Return the response as far as its events came, whether it is complete, and the error in the stream."""
    response: dict[str, Any] = {}
    items: dict[int, dict[str, Any]] = {}
    grown: dict[tuple[int, str], _Grown] = {}
    done, error = False, None
    for data in stream:
        if data.startswith(DONE):
            done = True
            break
        event = parse_object(data)
        kind = as_text(event.get("type"))
        if kind == "error" or event.get("error"):
            error = event.get("error") or event
        elif isinstance(event.get("response"), dict):
            response = event["response"]
            done = done or kind in ("response.completed", "response.incomplete", "response.failed")
        else:
            _add_to_items(items, grown, kind, event)
    for part, name, pieces in grown.values():
        part[name] = as_text(part.get(name)) + "".join(pieces)
    # Some servers leave the output out of the last event.
    if not objects(response.get("output")):
        response = {**response, "output": [items[index] for index in sorted(items)]}
    return response, done, error


# Events that bring a piece of a part: the list that holds the part, the part's type, and the field that grows.
_PIECES = {
    "response.output_text.delta": ("content", "output_text", "text"),
    "response.refusal.delta": ("content", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text", "text"),
}

# Events that bring a piece of an item: the field that grows.
_ARGUMENTS = {"response.function_call_arguments.delta": "arguments", "response.custom_tool_call_input.delta": "input"}


# A part or item, its field that grows, and the pieces. They are joined at the end: else each piece would copy all
# before it.
_Grown = tuple[dict[str, Any], str, list[str]]


def _add_to_items(
    items: dict[int, dict[str, Any]], grown: dict[tuple[int, str], _Grown], kind: str, event: dict[str, Any]
) -> None:
    index = event.get("output_index")
    if not isinstance(index, int):
        return
    if kind in ("response.output_item.added", "response.output_item.done"):
        items[index] = as_object(event.get("item"))
    elif kind in _ARGUMENTS:
        item, name = items.setdefault(index, {}), _ARGUMENTS[kind]
        grown.setdefault((id(item), name), (item, name, []))[2].append(as_text(event.get("delta")))
    elif kind in _PIECES:
        where, part_type, name = _PIECES[kind]
        item = items.setdefault(index, {"type": "message", "role": "assistant"})
        if not isinstance(item.get(where), list):
            item[where] = []
        position = event.get("content_index", event.get("summary_index"))
        part = _part_at(item[where], position if isinstance(position, int) else 0, part_type)
        grown.setdefault((id(part), name), (part, name, []))[2].append(as_text(event.get("delta")))


def _part_at(parts: list[Any], position: int, part_type: str) -> dict[str, Any]:
    # A position far beyond the end is a server's mistake, and not worth a list of that length.
    if not 0 <= position < len(parts) or not isinstance(parts[position], dict):
        parts.append({"type": part_type})
        position = -1
    return parts[position]


_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def messages(items: Iterable[dict[str, Any]]) -> list[JSON]:
    """Return the chat messages for the input items of a Responses request."""
    found: list[JSON] = []
    for assistants, group in groupby(items, _is_assistants):
        these = list(group)
        found += [answer_message(these)] if assistants else map(_others, these)
    return found


def _kind(item: dict[str, Any]) -> str:
    """Return the item's type. A message may leave it out."""
    return as_text(item.get("type")) or ("message" if "role" in item else "item_reference")


def _is_assistants(item: dict[str, Any]) -> bool:
    kind = _kind(item)
    if kind == "message":
        return item.get("role") == "assistant"
    # Outputs are what the app did for the model. All other items are the model's or the provider's doing.
    return not kind.endswith(("_output", "_response")) and kind not in ("additional_tools", "compaction_trigger")


def answer_message(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return one assistant message for items of the assistant that follow each other."""
    texts, refusals, thoughts, summaries = list[str](), list[str](), list[str](), list[str]()
    calls, others = list[JSON](), list[JSON]()
    for item in items:
        kind, content = _kind(item), item.get("content")
        if kind == "message" and isinstance(content, str):
            texts.append(content)
        elif kind == "message":
            for part in objects(content):
                if part.get("type") == "refusal":
                    refusals.append(as_text(part.get("refusal")))
                elif as_text(part.get("type")) in _TEXT_PARTS:
                    texts.append(as_text(part.get("text")))
                else:
                    others.append(_readable(part))
        elif kind == "function_call":
            function = {"name": as_text(item.get("name")), "arguments": as_text(item.get("arguments"))}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "custom_tool_call":
            custom = {"name": as_text(item.get("name")), "input": as_text(item.get("input"))}
            calls.append({"id": item.get("call_id"), "type": "custom", "custom": custom})
        elif kind == "reasoning":
            thoughts += _texts(content)
            summaries += _texts(item.get("summary"))
        else:
            others.append(_readable(item))
    found = {
        "refusal": "".join(refusals) if refusals else None,
        "tool_calls": calls or None,
        "reasoning_content": "".join(thoughts) if thoughts else None,
        # A summary is not the reasoning itself, so it gets a name that no chat template renders.
        "reasoning_summary": "\n\n".join(summaries) if summaries else None,
        "items": others or None,
    }
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    return message | {key: value for key, value in found.items() if value is not None}


def _others(item: dict[str, Any]) -> JSON:
    """Return the message of an item that is not the assistant's."""
    kind = _kind(item)
    if kind == "message":
        return {"role": as_text(item.get("role")) or "user", "content": _content(item.get("content"))}
    if kind in ("function_call_output", "custom_tool_call_output"):
        failed = {"is_error": True} if item.get("is_error") else {}  # Anthropic's
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output")), **failed}
    if kind.endswith("_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": None, "items": [_readable(item)]}
    return {"role": "user", "content": None, "items": [_readable(item)]}


def _content(content: Any) -> Any:
    """Return content in the terms of chat. A single part that is a text becomes that text."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in objects(content)]
    if len(parts) == 1 and parts[0].get("type") == "text":
        return parts[0]["text"]
    return parts


def _part(part: dict[str, Any]) -> JSON:
    kind = as_text(part.get("type"))
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": as_text(part.get("text"))}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    if kind == "input_file":
        return {"type": "file", "file": {key: value for key, value in part.items() if key != "type"}}
    return _readable(part)


def _texts(parts: Any) -> list[str]:
    return [as_text(part.get("text")) for part in objects(as_list(parts)) if part.get("text")]


def _readable(item: dict[str, Any]) -> JSON:
    # Only the provider can read `encrypted_content`, and it may be large.
    return {key: value for key, value in item.items() if key != "encrypted_content"}
