"""The OpenAI Agents SDK: one workflow, one trajectory, with its agents, tools, hand-overs and guardrails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.servers import Answer, chunks, completion, response, response_events, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def called(name: str, **arguments: Any) -> list[dict[str, Any]]:
    """The output of a response that calls one function."""
    call = {"id": f"fc_{name}", "type": "function_call", "call_id": f"call_{name}", "name": name}
    return [call | {"status": "completed", "arguments": json.dumps(arguments)}]


def answer(body: Any, path: str = "") -> Answer:
    """Guide asks Critic, then hands over to Painter, which looks; Broken calls what fails."""
    if "messages" in body:
        looked = any(message["role"] == "tool" for message in body["messages"])
        if looked:
            body = {key: value for key, value in body.items() if key != "tools"}
        if body.get("stream"):
            return Answer(events=chunks(body))
        return Answer(body=json.dumps(completion(body)).encode())
    said = [item for item in body["input"] if item.get("type") == "function_call_output"]
    plan = {
        "gpt-guide": [called("ask_critic", input="Is it good?"), called("transfer_to_painter")],
        "gpt-painter": [None, None, called("look", at="sky")],
        "gpt-broken": [called("fail", at="wall")],
    }.get(body["model"], [])
    output = plan[len(said)] if len(said) < len(plan) else None
    whole = body if output is None else body | {"tools": []}
    if output is None:
        whole = {key: value for key, value in body.items() if key != "tools"}
    changes = {} if output is None else {"output": output}
    if body.get("stream"):
        return Answer(events=response_events(whole, **changes))
    return Answer(body=json.dumps(response(whole, **changes)).encode())


TREES = {
    "gallery": [
        "agent Guide",
        "  call gpt-guide",
        "  call gpt-guide",
        "  guardrail polite",
        "    call judge",
        "  handoff Painter",
        "  tool ask_critic",
        "    agent Critic",
        "      call gpt-critic",
        "agent Painter",
        "  call gpt-painter",
        "  call gpt-painter",
        "  tool look",
    ],
    "streamed": ["agent Chatty", "  call gpt-chat", "  call gpt-chat", "  tool look"],
    "tripped": ["agent Guide", "  guardrail polite", "    call judge"],
    "broken": ["agent Broken", "  call gpt-broken", "  tool fail"],
    None: ["call alone"],
}


def test_a_workflow_is_one_trajectory(tmp_path: Path):
    python = environment("openai-agents", ["openai-agents>=0.24,<1", "websockets>=15,<18"])
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = answer
        told = run_app(python, "openai_agents_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert "integration agents.tracing" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {"openai-agents websocket": 1})
    found = trajectories(url)
    assert sorted(call.requested_model for each in found for call in each.calls) == sorted(asked)
    assert {each.info.name: tree(each) for each in found} == TREES
    gallery, streamed, tripped, broken, alone = found
    assert (gallery.info.session_id, gallery.info.metadata) == ("visit-1", {"lang": "de"})
    assert gallery.id.startswith("trace_") and gallery.info.ended_at is not None
    assert (streamed.info.session_id, alone.info.origin) == ("visit-2", "single")
    assert {(span.name, span.kind): (span.attributes, span.error) for span in gallery.spans} == {
        ("Guide", "agent"): ({"tools": ["ask_critic"], "handoffs": ["Painter"], "output_type": "str"}, None),
        ("polite", "guardrail"): ({"triggered": False}, None),
        ("ask_critic", "tool"): ({"input": '{"input": "Is it good?"}', "output": "Hello there!"}, None),
        ("Critic", "agent"): ({"tools": [], "handoffs": [], "output_type": "str"}, None),
        ("Painter", "handoff"): ({"from_agent": "Guide", "to_agent": "Painter"}, None),
        ("Painter", "agent"): ({"tools": ["look"], "handoffs": [], "output_type": "str"}, None),
        ("look", "tool"): ({"input": '{"at": "sky"}', "output": "the sky is blue"}, None),
    }
    scores = [(score.name, score.value, score.comment) for each in found for score in each.scores]
    assert scores == [("guardrail", 0.0, "polite")] and tripped.scores
    (failed,) = [span for span in broken.spans if span.kind == "tool"]
    assert failed.attributes == {"input": '{"at": "wall"}'} and "wall" in str(failed.error)
