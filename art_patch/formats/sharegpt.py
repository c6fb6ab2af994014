"""Reads rows of ShareGPT (`conversations` of `from` and `value`), as Axolotl and LLaMA-Factory write them. Pure.

A row gets the keys and roles of OpenAI's and TRL's rows, from which `foreign` makes trajectories. With `chosen` and
`rejected`, the two better and worse answers to the conversation, it is a preference row.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from art_patch.errors import MalformedFile

Row = Mapping[str, Any]

_ROLES = {
    "system": "system",
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "observation": "tool", "tool": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
_CALLS = ("function_call", "tool_call")
_OWN = ("conversations", "system")


def as_messages(row: Row) -> Row:
    """Return a row of ShareGPT with `messages`, or `prompt`, `chosen` and `rejected`; any other row as it is."""
    if "conversations" not in row or "messages" in row:
        return row
    rest = {name: value for name, value in row.items() if name not in _OWN and value is not None}
    messages = _conversation(row["conversations"], "conversations")
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    if rest.get("tools"):
        rest["tools"] = _tools(rest["tools"])
    if not {"chosen", "rejected"} <= rest.keys():
        return rest | {"messages": messages}
    answers = {name: _conversation(_listed(rest[name]), name) for name in ("chosen", "rejected")}
    return rest | answers | {"prompt": messages}


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]  # one answer, or several turns


def _conversation(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise MalformedFile(f"{where} must be a list of turns")
    messages: list[dict[str, Any]] = []
    called = False
    for index, each in enumerate(cast("list[Any]", value)):
        turn, path = cast("Row", each), f"{where}[{index}]"
        if not isinstance(each, dict):
            raise MalformedFile(f"{path} must be an object")
        said, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(said, str) or said.lower() not in _ROLES:
            raise MalformedFile(f"{path}.from must be one of {', '.join(_ROLES)}, not {said!r:.50}")
        if not isinstance(text, str):
            raise MalformedFile(f"{path}.value must be a text")
        message: dict[str, Any] = {"role": _ROLES[said.lower()], "content": text}
        if said.lower() in _CALLS:
            # As in OpenAI's older format, whose calls and results get the ids that tie them together.
            message |= {"content": None, "function_call": _called(text, path)}
            called = True
        elif message["role"] == "tool" and called:
            message["role"] = "function"
        if "weight" in turn:
            message["weight"] = turn["weight"]
        messages.append(message)
    return messages


def _called(text: str, path: str) -> Any:
    try:
        called: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedFile(f"{path}.value must be a function call as JSON, with name and arguments") from None
    if isinstance(called, list):
        calls = cast("list[Any]", called)
        if len(calls) != 1:
            raise MalformedFile(f"{path}.value has {len(calls)} function calls; write messages with tool_calls instead")
        called = calls[0]
    return called


def _tools(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise MalformedFile(f"tools is a text that is no JSON: {error}") from None
    if not isinstance(value, list):
        return value  # the caller says what it must be
    bare = (isinstance(tool, dict) and "name" in tool for tool in cast("list[Any]", value))
    return [
        {"type": "function", "function": tool} if is_bare else tool
        for tool, is_bare in zip(cast("list[Any]", value), bare, strict=True)
    ]
