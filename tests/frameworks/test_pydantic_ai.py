"""Pydantic AI by its OpenTelemetry spans: one run, one trajectory, with agents, tools and answers that did not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.servers import Answer, chunks, completion, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLAN: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "gpt-guide": [
        ("ask_painter", {"question": "What colour?"}),
        ("add", {"a": 1, "b": 2}),
        ("final_result", {"n": "many"}),
        ("final_result", {"n": 13}),
        ("final_result", {"n": 3}),
    ],
    "gpt-painter": [("look", {"at": "void"}), ("look", {"at": "sky"})],
}


PAINTER = [
    "agent Painter",
    "  call gpt-painter",
    "  call gpt-painter",
    "  call gpt-painter",
    "  tool look",
    "  tool look",
]
GUIDE = [
    "agent Guide",
    *["  call gpt-guide"] * 5,
    "  tool add",
    "  tool ask_painter",
    *(f"    {each}" for each in PAINTER),
]
NOTHING = "there is nothing"
TEXT = "Hello there!"


def answer(body: Any, path: str = "") -> Answer:
    """What the plan says, by the number of answers that the conversation has; then a text."""
    said = sum(message["role"] == "assistant" for message in body["messages"])
    plan = PLAN[body["model"]]
    if body.get("stream") or said >= len(plan):
        body = {key: value for key, value in body.items() if key != "tools"}
        return Answer(events=chunks(body)) if body.get("stream") else Answer(body=json.dumps(completion(body)).encode())
    name, arguments = plan[said]
    call = {"id": f"call_{said}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    whole = completion(body)
    whole["choices"][0]["message"]["tool_calls"] = [call]
    return Answer(body=json.dumps(whole).encode())


def test_a_run_is_one_trajectory(tmp_path: Path):
    python = environment("pydantic-ai", ["pydantic-ai-slim[openai]>=2.68,<3", "opentelemetry-sdk>=1.45,<2"])
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = answer
        told = run_app(python, "pydantic_ai_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert "integration opentelemetry.sdk.trace" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    guide, app, traced = found = trajectories(url)
    assert sorted(call.requested_model for each in found for call in each.calls) == sorted(asked)
    assert [tree(each) for each in found] == [GUIDE, PAINTER, ["agent Painter", "  call gpt-painter"]]
    assert [(each.info.name, each.info.origin) for each in found] == [
        ("Guide", "explicit"), ("app", "explicit"), ("Painter", "otel"),
    ]  # fmt: skip
    assert (guide.info.session_id, len(guide.id)) == ("visit-1", 32)
    assert [(span.name, span.attributes, span.error) for span in guide.spans] == [
        ("Guide", {"output": '{"n":3}'}, None),
        ("ask_painter", {"input": '{"question":"What colour?"}', "output": TEXT, "call_id": "call_0"}, None),
        ("Painter", {"output": TEXT}, None),
        ("look", {"input": '{"at":"void"}', "output": NOTHING, "call_id": "call_0"}, NOTHING),
        ("look", {"input": '{"at":"sky"}', "output": "the sky is blue", "call_id": "call_1"}, None),
        ("add", {"input": '{"a":1,"b":2}', "output": "3", "call_id": "call_1"}, None),
    ]
    retried, refused = ("valid", 0.0, "look: model_retry"), ("valid", 0.0, "the answer was not accepted")
    assert [(score.name, score.value, score.comment) for score in guide.scores] == [retried, refused, refused]
    assert [(score.name, score.value, score.comment) for score in app.scores] == [retried]
    assert traced.scores == ()
