"""What the local OpenAI-compatible server of the framework tests answers, by rule; no model is behind it.

A tool that is offered is called once, with the smallest arguments that its schema allows, `look` before any other; then
follows a text, or JSON if a schema asks for it. Chat completions and Responses, whole and streamed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.servers import Answer, chunks, completion, response, response_events

SKY = {"at": "sky"}
TEXT = "Hello there!"


def reply(body: Any, path: str = "") -> Answer:
    """Answer a request as the module says."""
    if path.partition("?")[0].endswith("/responses"):
        return _responses(body)
    if "messages" not in body:
        return Answer(body=b'{"object": "list", "data": [], "model": "e"}')
    asked = None if _looked(body["messages"]) else _tool(body.get("tools") or [], lambda tool: tool["function"])
    schema = ((body.get("response_format") or {}).get("json_schema") or {}).get("schema")
    return _completion(body, asked or (TEXT if schema is None else json.dumps(smallest(schema))))


def planned(plan: Mapping[str, Sequence[str | tuple[str, Any]]]) -> Callable[[Any, str], Answer]:
    """Answer the requests for each model by a plan, one after the other, then with a text.

    Args:
        plan: texts, or names and arguments of tools, by model.
    """
    asked: Counter[str] = Counter()

    def answer(body: Any, path: str = "") -> Answer:
        turn, said = asked[body["model"]], plan.get(body["model"], ())
        asked[body["model"]] += 1
        return _completion(body, said[turn] if turn < len(said) else TEXT)

    return answer


def _completion(body: Any, said: str | tuple[str, Any]) -> Answer:
    message: dict[str, Any] = {"role": "assistant", "content": said}
    finish = "stop"
    if not isinstance(said, str):
        function = {"name": said[0], "arguments": json.dumps(said[1])}
        message = {"role": "assistant", "content": None}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
        finish = "tool_calls"
    if body.get("stream"):
        return Answer(events=_streamed(body, message, finish))
    whole = completion({**body, "tools": None})
    for choice in whole["choices"]:
        choice |= {"message": message, "finish_reason": finish}
    return Answer(body=json.dumps(whole).encode())


def smallest(schema: Any, of: Any = None) -> Any:
    """Return the smallest thing that a JSON schema allows, as far as tools use schemas."""
    of = schema if of is None else of
    if "$ref" in schema:
        found = of
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return smallest(found, of)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return smallest(schema[several][0], of)
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or "properties" in schema:
        places = schema.get("properties", {})
        return {name: "sky" if name == "at" else smallest(places[name], of) for name in schema.get("required", places)}
    simple = {"string": "x", "integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}
    return simple.get(kind or "string", "x")


def _looked(messages: Any) -> bool:
    """Whether the last thing said is what a tool returned, or the model has spoken since the user did."""
    last = messages[-1]["role"]
    return last in ("tool", "function", "assistant")


def _tool(tools: Any, inner: Any) -> tuple[str, Any] | None:
    functions = [inner(tool) for tool in tools if tool.get("type") == "function"]
    if not functions:
        return None
    asked = next((each for each in functions if each["name"] == "look"), functions[0])
    return asked["name"], smallest(asked.get("parameters") or {})


def _streamed(body: Any, message: dict[str, Any], finish: str) -> list[bytes]:
    if message["content"] == TEXT:
        return chunks({**body, "tools": None})
    calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    parts = [
        {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
    ]
    return [*(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts), b"data: [DONE]\n\n"]


def _responses(body: Any) -> Answer:
    said = body["input"] if isinstance(body["input"], list) else []
    looked = bool(said) and said[-1].get("type") == "function_call_output"
    asked = None if looked else _tool(body.get("tools") or [], lambda tool: tool)
    whole = {**body, "tools": None}
    changes: dict[str, Any] = {}
    if asked is not None:
        call = {"id": "fc_1", "type": "function_call", "call_id": "call_1", "status": "completed", "name": asked[0]}
        changes["output"] = [call | {"arguments": json.dumps(asked[1])}]
        whole = body
    if body.get("stream"):
        return Answer(events=response_events(whole, **changes))
    return Answer(body=json.dumps(response(whole, **changes)).encode())
