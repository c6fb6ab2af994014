"""What each engine hands to the chat template: messages, tools and arguments in its normal form. Pure.

| | embedded | vLLM 0.32 |
|---|---|---|
| parts of a content | joined | joined by newlines |
| keys of a message | all | those that it knows; thoughts under both names |
| arguments of a tool call that are no object | as they are | `{}` |
| a developer's message | a system's | the same, and all of them one, where the template does not know the role |
| a tool | as it came | its known keys in vLLM's order, `description` and `parameters` null where they lack |
| tools under `tool_choice: none` | hidden | shown |

The embedded engine's is `art_patch.serving.embedded.prompts`, vLLM's its `renderers/chat_utils.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, cast

from art_patch.formats import Unusable
from art_patch.types import JSON, Call

Engine = Literal["embedded", "vllm"]
THOUGHTS = ("reasoning", "reasoning_content")
"""Where servers put the thoughts of an assistant message."""

_TEXTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, slots=True)
class Form:
    """One engine's.

    Attributes:
        messages: takes messages and the template.
        tools: takes a call.
    """

    messages: Callable[[Sequence[JSON], str], list[dict[str, Any]]]
    tools: Callable[[Call], list[dict[str, Any]]]


def template_arguments(params: JSON) -> dict[str, Any]:
    """Return the further variables that a call gives the template; vLLM alone takes `reasoning_effort`."""
    given: Any = params.get("chat_template_kwargs")
    arguments: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    effort = params.get("reasoning_effort")
    if effort is not None:
        arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
    return arguments


def content_text(content: Any, between: str = "") -> str:
    """Return a message's content as one text.

    Raises:
        Unusable: it is more than text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[str] = []
    for part in cast("Sequence[Any]", content):
        kind = cast("JSON", part).get("type") if isinstance(part, Mapping) else None
        text = cast("JSON", part).get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            raise Unusable("it holds an image, audio or file")
        parts.append(text)
    return between.join(parts)


def _embedded_messages(messages: Sequence[JSON], _template: str) -> list[dict[str, Any]]:
    return [_embedded_message(message) for message in messages]


def _embedded_message(message: JSON) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    shown: dict[str, Any] = {**message, "role": role, "content": content_text(message.get("content"))}
    if shown.get("tool_calls"):
        shown["tool_calls"] = [_with_arguments(call, keep=True) for call in shown["tool_calls"]]
    else:
        shown.pop("tool_calls", None)
    return shown


def _embedded_tools(call: Call) -> list[dict[str, Any]]:
    return [] if call.params.get("tool_choice") == "none" else [dict(tool) for tool in call.tools]


def _vllm_messages(messages: Sequence[JSON], template: str) -> list[dict[str, Any]]:
    shown = [_vllm_message(message) for message in messages]
    if '"developer"' in template or "'developer'" in template or all(m["role"] != "developer" for m in shown):
        return shown
    systems = [message for message in shown if message["role"] in ("system", "developer")]
    rest = [message for message in shown if message not in systems]
    if len(systems) == 1 and systems[0] is shown[0]:
        return [{**shown[0], "role": "system"}, *rest]
    return [{"role": "system", "content": "\n\n".join(m["content"] for m in systems if m["content"])}, *rest]


def _vllm_message(message: JSON) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message["role"], "content": content_text(message.get("content"), "\n")}
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    if message["role"] == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    if message["role"] == "assistant":
        thoughts = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
        shown |= {} if thoughts is None else dict.fromkeys(THOUGHTS, thoughts)
        if calls := message.get("tool_calls"):
            shown["tool_calls"] = [_with_arguments(call, keep=False) for call in calls]
    return shown


def _vllm_tools(call: Call) -> list[dict[str, Any]]:
    return [_vllm_tool(tool["function"]) for tool in call.tools]


def _vllm_tool(given: JSON) -> dict[str, Any]:
    function = {key: given.get(key) for key in ("name", "description", "parameters")}
    function |= {key: given[key] for key in ("strict", "defer_loading") if given.get(key) is not None}
    return {"type": "function", "function": function}


def _with_arguments(call: JSON, *, keep: bool) -> dict[str, Any]:
    """The tool call with its arguments as an object; what is none is kept, or emptied."""
    function = dict(call["function"])
    text = function.get("arguments")
    try:
        parsed = text if isinstance(text, Mapping) else json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, Mapping):
        function["arguments"] = parsed
    elif not keep:
        function["arguments"] = {}
    return {**call, "function": function}


FORMS: Mapping[Engine, Form] = MappingProxyType(
    {"embedded": Form(_embedded_messages, _embedded_tools), "vllm": Form(_vllm_messages, _vllm_tools)}
)
