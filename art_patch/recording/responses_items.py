"""Items of the Responses API -> messages of chat. The same code reads a prompt, an answer, and a prompt to translate.

One answer consists of many items, and the client sends them back as many. All items of the assistant that follow each
other (texts, refusals, function calls, what it thought) are therefore one assistant message, so that the echo of an
answer is the answer. What has no equivalent in chat (hosted tools' calls, references) is kept under `items` of the
message it belongs to, as it came but for `encrypted_content`, which nobody can read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from art_patch._lib.loose_json import as_list, as_text, objects
from art_patch.types import JSON

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def messages(items: Iterable[dict[str, Any]]) -> list[JSON]:
    """Return the messages that the items amount to."""
    found: list[JSON] = []
    turn: _AssistantTurn | None = None
    for item in items:
        if _is_assistants(item):
            turn = turn or _AssistantTurn()
            turn.add(item)
            continue
        if turn is not None:
            found.append(turn.message())
            turn = None
        found.append(_others(item))
    if turn is not None:
        found.append(turn.message())
    return found


def answer_message(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the one assistant message that an answer's items amount to."""
    turn = _AssistantTurn()
    for item in items:
        turn.add(item)
    return turn.message()


def _kind(item: dict[str, Any]) -> str:
    """The item's type; a message may leave it out."""
    return as_text(item.get("type")) or ("message" if "role" in item else "item_reference")


def _is_assistants(item: dict[str, Any]) -> bool:
    kind = _kind(item)
    if kind == "message":
        return item.get("role") == "assistant"
    # What the app did for the model, or says itself; everything else is the model's or the provider's doing.
    return not kind.endswith(("_output", "_response")) and kind not in ("additional_tools", "compaction_trigger")


class _AssistantTurn:
    """The assistant's items of one answer, in the making of a message."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._refusals: list[str] = []
        self._thoughts: list[str] = []
        self._summaries: list[str] = []
        self._calls: list[JSON] = []
        self._others: list[JSON] = []

    def add(self, item: dict[str, Any]) -> None:
        kind = _kind(item)
        if kind == "message":
            self._add_content(item.get("content"))
        elif kind == "function_call":
            function = {"name": as_text(item.get("name")), "arguments": as_text(item.get("arguments"))}
            self._calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "custom_tool_call":
            custom = {"name": as_text(item.get("name")), "input": as_text(item.get("input"))}
            self._calls.append({"id": item.get("call_id"), "type": "custom", "custom": custom})
        elif kind == "reasoning":
            self._thoughts += _texts(item.get("content"))
            self._summaries += _texts(item.get("summary"))
        else:
            self._others.append(_readable(item))

    def _add_content(self, content: Any) -> None:
        if isinstance(content, str):
            self._texts.append(content)
        for part in objects(content):
            kind = as_text(part.get("type"))
            if kind == "refusal":
                self._refusals.append(as_text(part.get("refusal")))
            elif kind in _TEXT_PARTS:
                self._texts.append(as_text(part.get("text")))
            else:
                self._others.append(_readable(part))

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts) if self._texts else None}
        if self._refusals:
            message["refusal"] = "".join(self._refusals)
        if self._calls:
            message["tool_calls"] = self._calls
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self._summaries:
            # Not the reasoning itself: a name of its own, which no chat template renders.
            message["reasoning_summary"] = "\n\n".join(self._summaries)
        if self._others:
            message["items"] = self._others
        return message


def _others(item: dict[str, Any]) -> JSON:
    """A message of somebody else than the assistant."""
    kind = _kind(item)
    if kind == "message":
        return {"role": as_text(item.get("role")) or "user", "content": _content(item.get("content"))}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind.endswith("_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": None, "items": [_readable(item)]}
    return {"role": "user", "content": None, "items": [_readable(item)]}


def _content(content: Any) -> Any:
    """A text stays a text, and a single part that is a text becomes one."""
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
    return {key: value for key, value in item.items() if key != "encrypted_content"}
