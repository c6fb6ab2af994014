"""The champion's chat answer as the Responses object that the app asked for.

The SDK parses what is made here, so the app holds a genuine `Response`. Request fields that the API repeats are
repeated as the app gave them; ids are ours; `model` is the name the app used. `system_fingerprint`, a field that the
SDK keeps although it does not know it here, names the policy, as it does for chat.

Reasoning of a local model is not handed out: the app would send it back with its next call, which may go upstream, and
the provider refuses reasoning that is not its own. The record has it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from art_patch.patching.disguise import Disguise, InvalidAnswer, StreamDisguise, dump
from art_patch.patching.eligible import merged_body
from art_patch.records import JSON

_WHY_INCOMPLETE = {
    "stop": None,
    "tool_calls": None,
    "function_call": None,
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}
"""Finish reason of chat -> why the response is incomplete, in the words of this API; `None` if it is complete."""

_REPEATED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, with what the API says where the app said nothing."""


def disguise(options: Any, local: Any) -> ResponsesDisguise:
    """Return the disguise for the answer to `local`, which was made from `options`."""
    given = merged_body(options)
    return ResponsesDisguise(
        policy=local.json_data["model"],
        requested_model=given["model"],
        n=1,
        keeps_logprobs=False,
        keeps_token_ids=False,
        request=given,
    )


@dataclass(frozen=True, slots=True)
class ResponsesDisguise(Disguise):
    """Checks like chat, hands out a response.

    Attributes:
        request: what the app asked, in its own words.
    """

    request: JSON

    def whole(self, body: bytes) -> bytes:
        """Return the response's body.

        Raises:
            InvalidAnswer: if the engine's answer is none.
        """
        answer = self.checked(body)
        choice: dict[str, Any] = answer["choices"][0]
        why, response = why_incomplete(choice["finish_reason"]), self.begun(answer)
        finish(response, output(choice["message"], why), why, answer.get("usage"))
        return dump(response)

    def stream(self) -> StreamDisguise:
        """Return what makes a stream of the response's events."""
        from art_patch.patching.responses_stream import ResponsesStream

        return ResponsesStream(self)

    def begun(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of which nothing but the beginning is known; `answer` is the engine's, or a chunk."""
        created = answer.get("created")
        repeated = {key: self.request.get(key) for key in _REPEATED}
        return {
            "id": new_item_id("resp"),
            "object": "response",
            "created_at": created if isinstance(created, int) else int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.requested_model,
            "output": [],
            "store": False,
            "system_fingerprint": self.policy,
            "usage": None,
            **{key: _REPEATED[key] if value is None else value for key, value in repeated.items()},
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
        response: as `ResponsesDisguise.begun` returned it.
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
