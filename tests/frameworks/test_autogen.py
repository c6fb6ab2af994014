"""AutoGen: a run of an agent or a team is a trajectory; its OpenTelemetry spans are the steps."""

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
    pytest.mark.skipif(not FULL, reason="needs AutoGen's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

NEWEST = ("autogen-agentchat>=0.7.5,<0.8", "autogen-ext[openai]>=0.7.5,<0.8", "opentelemetry-sdk<2")
PLAN: dict[str, list[Any]] = {
    "gpt-guide": [("painter", {"task": "Paint."})],
    "gpt-painter": [("look", {"at": "void"}), ("look", {"at": "sky"})],
    "gpt-first": [("transfer_to_second", {})],
}
TREES = {
    "guide": [
        "agent guide",
        *["  call gpt-guide"] * 2,
        "  tool painter",
        "    agent painter",
        *["      call gpt-painter"] * 3,
        *["      tool look"] * 2,
    ],
    "streamer": ["agent streamer", "  call gpt-streamer"],
    "RoundRobinGroupChat": ["agent one", "  call gpt-one", "agent two", "  call gpt-two"],
    "app": [
        "agent first",
        "  call gpt-first",
        "  tool transfer_to_second",
        *["agent second", "  call gpt-second"] * 2,
    ],
    "left": ["agent left", "  call gpt-left"],
    "right": ["agent right", "  call gpt-right"],
}


def test_a_run_is_one_trajectory(tmp_path: Path):
    python = environment("autogen-agentchat", NEWEST)
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned(PLAN)
        told = run_app(python, "autogen_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert {"integration autogen_agentchat.agents", "integration autogen_agentchat.teams"} <= set(told["instrumented"])
    assert (told["errors"], told["bypasses"]) == ({}, {})
    found = {each.info.name: each for each in trajectories(url)}
    assert sorted(call.requested_model for each in found.values() for call in each.calls) == sorted(asked)
    assert {name: tree(each) for name, each in found.items()} == TREES
    assert all(each.info.ended_at is not None for each in found.values())
    called = {"call_id": "call_1"}
    assert [(span.name, span.attributes, span.error) for span in found["guide"].spans if span.kind == "tool"] == [
        ("painter", called, None),
        ("look", called, "ValueError: there is nothing"),
        ("look", called, None),
    ]
