"""Reads requests and answers of Anthropic's Messages API as messages of chat completions.

Its blocks are read as the items of the Responses API that say the same: `tool_use` becomes a tool call, `tool_result` a
message of role `tool`, `thinking` becomes `reasoning_content`, and calls of hosted tools are kept under the key
`items`. A client sends the blocks of an answer back in its next request, and they become an equal message there.
Signatures and encrypted thoughts are left out, because only the provider can read them.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from art_patch._lib.loose_json import as_count, as_list, as_object, as_text, objects, parse_object
from art_patch.recording.chat import Answered, Asked, events, is_whole
from art_patch.recording.responses import answer_message, read_responses_request
from art_patch.types import JSON, Choice

# fmt: off
_REASONS = {
    "end_turn": "stop", "max_tokens": "length", "model_context_window_exceeded": "length", "refusal": "content_filter",
    "stop_sequence": "stop", "tool_use": "tool_calls",
}
# fmt: on

# What only the provider can read or use.
_UNREADABLE = frozenset({"cache_control", "data", "encrypted_content", "encrypted_index", "signature"})

# Fields of a request that have another name in the Responses API, or none there.
_RENAMED = frozenset(
    {"cache_control", "max_tokens", "messages", "stop_sequences", "system", "tool_choice", "tools", "top_k"}
)


def read_messages_request(request: dict[str, Any]) -> Asked:
    """Return the parsed request of a Messages call."""
    asked = read_responses_request(as_responses_request(request))
    own = {"stop": request.get("stop_sequences") or None, "top_k": request.get("top_k")}
    return replace(asked, params=asked.params | {name: value for name, value in own.items() if value is not None})


def as_responses_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return the Responses request that asks the same. A part that this API lacks is kept as it is, or as `items`."""
    system = [{"role": "system", "content": request["system"]}] if request.get("system") else []
    choice, output = as_object(request.get("tool_choice")), as_object(request.get("output_config"))
    kind, form = choice.get("type"), as_object(output.get("format"))
    known = {
        "any": "required",
        "auto": "auto",
        "none": "none",
        "tool": {"type": "function", "name": choice.get("name")},
    }
    return {
        **{name: value for name, value in request.items() if name not in _RENAMED},
        "input": [item for given in [*system, *as_list(request.get("messages"))] for item in _items(as_object(given))],
        "max_output_tokens": request.get("max_tokens"),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "reasoning": {"effort": output.get("effort")},
        "store": False,
        "text": {"format": {"type": "json_schema", "schema": form.get("schema")} if form else None},
        "tool_choice": known.get(as_text(kind), choice or None),
        "tools": [_tool(tool) for tool in objects(request.get("tools"))],
    }


def _tool(tool: dict[str, Any]) -> JSON:
    if tool.get("type", "custom") != "custom":
        return tool
    renamed = {"type": "function", "parameters": tool.get("input_schema")}
    return {name: tool[name] for name in tool if name not in ("cache_control", "input_schema")} | renamed


def _items(message: dict[str, Any]) -> list[JSON]:
    """Return the items of a message. Results of tools come first, as the API demands."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    blocks = [as_object(block) for block in as_list(message.get("content"))]
    if role == "assistant":
        return [_item(block) for block in blocks]
    found = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    parts = [_part(block, "input_text") for block in blocks if block.get("type") != "tool_result"]
    return [*found, {"role": role, "content": parts}] if parts or not found else found


def _result(block: dict[str, Any]) -> JSON:
    output = block.get("content") or ""
    if isinstance(output, list):
        output = [_part(part, "input_text") for part in map(as_object, as_list(block.get("content")))]
    failed = {"is_error": True} if block.get("is_error") else {}
    return {"type": "function_call_output", "call_id": block.get("tool_use_id"), "output": output, **failed}


def _part(block: dict[str, Any], text: str) -> JSON:
    """Return the part for a block; `text` is the type of a part with text."""
    source = as_object(block.get("source"))
    if block.get("type") == "image" and source.get("type") in ("base64", "url"):
        url = source.get("url") or f"data:{as_text(source.get('media_type'))};base64,{as_text(source.get('data'))}"
        return {"type": "input_image", "image_url": url}
    kept = {name: value for name, value in block.items() if name != "cache_control"}
    return kept | {"type": text} if block.get("type") == "text" else kept


def _item(block: dict[str, Any]) -> JSON:
    """Return the item of a block of the assistant."""
    kind, given = block.get("type"), block.get("input")
    if kind == "text":
        return {"type": "message", "role": "assistant", "content": [_part(block, "output_text")]}
    if kind == "thinking":
        return {"type": "reasoning", "content": [{"text": as_text(block.get("thinking"))}]}
    if kind == "tool_use":
        # A text is what a stream brought and was no JSON. Engines write arguments with these separators, too.
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {"type": "function_call", "call_id": block.get("id"), "name": block.get("name"), "arguments": arguments}
    return {key: value for key, value in block.items() if key not in _UNREADABLE}


def read_messages_answer(raw: bytes) -> Answered:
    """Return the parsed answer of a Messages call, from one JSON object or a stream of events."""
    message, done, error = (parse_object(raw), True, None) if is_whole(raw) else _assemble(events(raw))
    usage, blocks = as_object(message.get("usage")), objects(message.get("content"))
    reason = as_text(message.get("stop_reason")) or None
    answer = answer_message([as_object(_item(block)) for block in blocks])
    # Tokens that are read from the cache or written to it are not among `input_tokens`.
    read = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return Answered(
        choices=(Choice(0, answer, _REASONS.get(reason or "", reason)),) if blocks or reason else (),
        done=done,
        error=error or message.get("error"),
        model=as_text(message.get("model")) or None,
        prompt_tokens=as_count(sum(as_count(usage.get(name)) or 0 for name in read)) if usage else None,
        completion_tokens=as_count(usage.get("output_tokens")),
    )


# Type of a delta -> its field with a piece of text, and the field of the block that it belongs to.
_PIECES = {
    "input_json_delta": ("partial_json", "input"),
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
}


def _assemble(stream: Iterable[str]) -> tuple[dict[str, Any], bool, Any]:
    """Return the message as far as its events came, whether it is complete, and the error in the stream."""
    message: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    pieces: dict[tuple[Any, str], list[str]] = {}
    done, error = False, None
    for data in stream:
        event = parse_object(data)
        kind, index, delta = event.get("type"), as_count(event.get("index")), as_object(event.get("delta"))
        if kind == "message_start":
            message = as_object(event.get("message"))
        elif kind == "content_block_start":
            blocks[index] = as_object(event.get("content_block"))
        elif kind == "content_block_delta" and index in blocks and (known := _PIECES.get(as_text(delta.get("type")))):
            pieces.setdefault((index, known[1]), []).append(as_text(delta.get(known[0])))
        elif kind == "message_delta":
            message = {**message, **delta, "usage": as_object(message.get("usage")) | as_object(event.get("usage"))}
        done, error = done or kind == "message_stop", event.get("error") or error
    for (index, field), found in pieces.items():
        text = "".join(found)
        blocks[index][field] = _input(text) if field == "input" else as_text(blocks[index].get(field)) + text
    return {**message, "content": list(blocks.values())}, done, error


def _input(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text
