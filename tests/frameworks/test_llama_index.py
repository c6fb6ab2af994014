"""LlamaIndex by its instrumentation: agents, workflows and engines are trajectories, with all that happens inside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.replies import planned
from tests.support.servers import serving

FULL = bool(os.environ.get("ART_PATCH_FULL"))
pytestmark = [
    pytest.mark.skipif(not FULL, reason="needs LlamaIndex's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

NEWEST = ("llama-index-core>=0.14.25,<0.15", "llama-index-llms-openai>=0.8,<0.9")
PLAN: dict[str, list[Any]] = {
    "gpt-guide": [("facts", {"input": "sky"}), ("handoff", {"to_agent": "Painter", "reason": "It paints."})],
    "gpt-painter": [("look", {"at": "void"}), ("look", {"at": "sky"})],
    "gpt-thinker": ["Action: look", "Thought: I know.\nAnswer: blue"],
}

TREES = {
    "AgentWorkflow": [
        "agent AgentWorkflow",
        *["  agent Guide", "    call gpt-guide"] * 2,
        *["  agent Painter", "    call gpt-painter"] * 3,
        "  handoff Painter",
        "  tool facts",
        "    agent RetrieverQueryEngine",
        "      call gpt-facts",
        "      retrieval SummaryIndexRetriever",
        "  tool look",
        "  tool look",
    ],
    "one": ["agent one", "  call gpt-one"],
    "two": ["agent two", "  call gpt-two"],
    "app": ["agent Flow", "  node draft", "    agent Helper", "      call gpt-helper", "    call gpt-draft"],
    "Thinker": ["agent Thinker", "  call gpt-thinker", "  call gpt-thinker"],
    "Counter": ["agent Counter", "  call gpt-counter", "  call gpt-counter"],
    "RetrieverQueryEngine": ["agent RetrieverQueryEngine", "  call gpt-query", "  retrieval SummaryIndexRetriever"],
    None: ["call gpt-alone"],
}
TEXT = "Hello there!"
HANDED = (
    "Agent Painter is now handling the request due to the following reason: It paints..\n"
    "Please continue with the current request."
)


def test_a_run_is_one_trajectory(tmp_path: Path):
    python = environment("llama-index-core", NEWEST)
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned(PLAN)
        told = run_app(python, "llama_index_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert "integration llama_index_instrumentation" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    found = {each.info.name: each for each in trajectories(url)}
    assert sorted(call.requested_model for each in found.values() for call in each.calls) == sorted(asked)
    assert {name: tree(each) for name, each in found.items()} == TREES
    team = found["AgentWorkflow"]
    assert (team.info.session_id, team.info.ended_at is not None) == ("visit-1", True)
    (retrieval,) = [span for span in team.spans if span.kind == "retrieval"]
    (document,) = retrieval.attributes["output"]
    assert document.pop("id") and document == {"text": "The sky is blue.", "score": None}
    assert [(span.name, span.attributes, span.error) for span in team.spans if span.kind in ("tool", "handoff")] == [
        ("facts", {"input": {"input": "sky"}, "output": TEXT}, None),
        ("Painter", {"input": {"to_agent": "Painter", "reason": "It paints."}, "output": HANDED}, None),
        ("look", {"input": {"at": "void"}}, "ValueError: there is nothing"),
        ("look", {"input": {"at": "sky"}, "output": "the sky is blue"}, None),
    ]
    assert [span.attributes for span in team.spans[:1]] == [{"input": "What colour?", "output": TEXT}]
    scores = [
        (each.info.name, score.name, score.value, score.comment) for each in found.values() for score in each.scores
    ]
    unread = "Error while parsing the output: Could not extract tool use from input text: Action: look"
    assert scores == [
        ("Thinker", "valid", 0.0, unread),
        ("Counter", "valid", 0.0, "Expected at least one tool call, but got 0 tool calls."),
    ]
