"""The objects that LangChain gives to callbacks, as plain values: messages, documents, commands, states.

Of a long list the last items are kept, because a conversation's outcome is at its end. The recorder limits the length
of texts.
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
    """Return the value with LangChain's own classes taken apart; other values stay as they are."""
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
            if told.keys() == {"update"}:  # a command that only updates the state
                return shown(told["update"], depth + 1)
            return {key: shown(each, depth + 1) for key, each in told.items()}
        case "sequence":
            items = [shown(each, depth + 1) for each in value[-_MOST_ITEMS:]]
            return items[0] if len(items) == 1 and hasattr(value[0], "goto") else items
        case _:
            return value


@lru_cache(maxsize=1024)
def _form(kind: type) -> str:
    """Return the form of a class; cached, because it is asked for every value."""
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
    """Whether a part is a node of a graph, or a task of a graph that is written as a function."""
    tags, metadata = told.get("tags") or (), told.get("metadata") or {}
    if "langsmith:hidden" in tags:
        return False
    if any(tag.startswith("graph:step") for tag in tags):
        return True
    path = metadata.get("langgraph_path") or ()
    return path[-1:] == (True,) and told.get("name") == metadata.get("langgraph_node")


def run_facts(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Run` for a graph: its name, session, user, tags and metadata."""
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
    """Return a tool's result, and the id and error of its call."""
    if getattr(output, "type", None) != "tool":
        return shown(output), {}
    failed = str(output.content) if getattr(output, "status", None) == "error" else None
    return output.content, {"tool_call_id": output.tool_call_id, "error": failed}


def is_a(error: object, *names: str) -> bool:
    """Whether an error's class or a base of it has one of these names; the classes need not be imported."""
    return any(kind.__name__ in names for kind in type(error).__mro__)
