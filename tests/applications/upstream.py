"""What the provider of the applications answers, by rule: chat, Responses, embeddings, Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from tests.support import other_providers, replies
from tests.support.servers import Answer, StubServer

ENDS = {"bash": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}
"""Tools with which an application ends its job, and their arguments. Of all others only `look` is called."""


def is_call(path: str) -> bool:
    """Whether a request asks a model for text."""
    place = path.partition("?")[0]
    return place.endswith(("/chat/completions", "/responses", "/messages", "/completions")) or "enerateContent" in place


class Upstream(StubServer):
    """Answers by rule."""

    def answer(self, body: Any, path: str = "") -> Answer:
        """The answer to a request."""
        place = path.partition("?")[0]
        if place.endswith("/messages"):
            return _anthropic(bool(body.get("stream")))
        if place.endswith("/embeddings"):
            return _embeddings(body)
        if place.endswith("/completions") and "prompt" in body:
            return super().answer(body, path)
        tools = [tool for tool in body.get("tools") or () if _name(tool) in ("look", *ENDS)]
        if tools and _name(tools[0]) in ENDS and body.get("messages", [{}])[-1].get("role") == "user":
            return replies.planned({body["model"]: [(_name(tools[0]), ENDS[_name(tools[0])])]})(body, path)
        forced = body.get("tool_choice")
        if isinstance(forced, dict) and (name := _name(forced)):
            (its,) = [tool for tool in body["tools"] if _name(tool) == name]
            return replies.planned({body["model"]: [(name, _arguments(its))]})(body, path)
        return replies.reply({**body, "tools": tools}, path)


def _arguments(tool: Any) -> dict[str, Any]:
    """A value for each parameter, by its type."""
    known = {"integer": 4, "number": 4.0, "boolean": True, "string": "a cat"}
    schema = (tool.get("function") or tool)["parameters"]
    return {key: known.get(its.get("type")) for key, its in schema.get("properties", {}).items()}


def _name(tool: Any) -> str:
    return (tool.get("function") or tool).get("name", "")


def _anthropic(stream: bool) -> Answer:
    parts = other_providers.anthropic(stream)
    if not stream:
        return Answer(body=json.dumps(parts[0]).encode())
    return Answer(events=[f"event: {part['type']}\ndata: {json.dumps(part)}\n\n".encode() for part in parts])


def _embeddings(body: Any) -> Answer:
    texts = body["input"] if isinstance(body["input"], list) and body["input"] else [body["input"]]
    size = body.get("dimensions") or 1536
    # Equal texts get the same direction.
    vectors = [[1.0 + (len(str(text)) + at) % 7 / 10 for at in range(size)] for text in texts]
    data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return Answer(body=json.dumps({"object": "list", "data": data, "model": body["model"], "usage": usage}).encode())


@contextmanager
def serving() -> Generator[Upstream]:
    """A running server."""
    server = Upstream()
    try:
        yield server
    finally:
        server.close()
