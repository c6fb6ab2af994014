"""What LangChain hands to callbacks, as plain values: messages, documents, commands, states.

Of a long list the last items are kept, because a conversation's outcome is at its end. How long texts may be is seen to
where they are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel

_MOST_ITEMS = 32
_DEEPEST = 5
_OWN_METADATA = ("langgraph_", "ls_", "lc_", "checkpoint_", "__pregel_")
_SESSION = ("thread_id", "session_id", "conversation_id")


def shown(value: Any, depth: int = 0) -> Any:
    """Return the value with LangChain's own classes taken apart; what is none of them stays as it is."""
    if depth > _DEEPEST:
        return value
    match _form(type(value)):
        case "message":
            told = {"role": value.type, "content": value.content, "tool_calls": getattr(value, "tool_calls", None)}
            return {key: each for key, each in told.items() if each}
        case "document":
            return {"content": value.page_content, "metadata": getattr(value, "metadata", None)}
        case "mapping":
            return {str(key): shown(each, depth + 1) for key, each in value.items()}
        case "model":
            return {key: shown(each, depth + 1) for key, each in value}
        case "dataclass":
            told = {each.name: getattr(value, each.name) for each in fields(value) if getattr(value, each.name)}
            if told.keys() == {"update"}:  # a command that sends nobody anywhere
                return shown(told["update"], depth + 1)
            return {key: shown(each, depth + 1) for key, each in told.items()}
        case "sequence":
            items = [shown(each, depth + 1) for each in value[-_MOST_ITEMS:]]
            return items[0] if len(items) == 1 and hasattr(value[0], "goto") else items
        case _:
            return value


@lru_cache(maxsize=1024)
def _form(kind: type) -> str:
    """What a value of this class is; asked of every value that comes by."""
    known: Mapping[str, Any] = getattr(kind, "model_fields", {}) if issubclass(kind, BaseModel) else {}
    for form, is_one in (
        ("message", known.keys() >= {"content", "type"}),
        ("document", "page_content" in known),
        ("plain", issubclass(kind, str | bytes | bytearray)),
        ("mapping", issubclass(kind, Mapping)),
        ("model", issubclass(kind, BaseModel)),
        ("dataclass", is_dataclass(kind)),
        ("sequence", issubclass(kind, Sequence)),
    ):
        if is_one:
            return form
    return "plain"


def is_node(told: Mapping[str, Any]) -> bool:
    """Whether what was started is a node of a graph, or a task of one that is written as a function."""
    tags, metadata = told.get("tags") or (), told.get("metadata") or {}
    if "langsmith:hidden" in tags:
        return False
    if any(tag.startswith("graph:step") for tag in tags):
        return True
    path = metadata.get("langgraph_path") or ()
    return path[-1:] == (True,) and told.get("name") == metadata.get("langgraph_node")


def told_of_run(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Run` takes, from what a graph was started with: its name, and its metadata and tags."""
    metadata: dict[str, Any] = dict(told.get("metadata") or {})
    session = next((metadata[key] for key in _SESSION if metadata.get(key) is not None), None)
    user = metadata.get("user_id")
    known = (*_SESSION, "user_id")
    return {
        "name": told.get("name") or "LangGraph",
        "session_id": None if session is None else str(session),
        "user_id": None if user is None else str(user),
        "tags": tuple(told.get("tags") or ()),
        "metadata": {
            key: each for key, each in metadata.items() if key not in known and not key.startswith(_OWN_METADATA)
        },
    }


def output_of_tool(output: Any) -> tuple[Any, dict[str, Any]]:
    """Return what a tool gave back, and what else is known of it: the id of its call, and how it failed."""
    if getattr(output, "type", None) != "tool":
        return shown(output), {}
    failed = str(output.content) if getattr(output, "status", None) == "error" else None
    return output.content, {"tool_call_id": output.tool_call_id, "error": failed}


def is_a(error: object, *names: str) -> bool:
    """Whether an error is of a class of one of these names, which need not be imported for that."""
    return any(kind.__name__ in names for kind in type(error).__mro__)
