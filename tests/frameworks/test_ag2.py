"""AG2: what an agent is asked is a trajectory, with its tools and the agents that they ask."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.replies import TEXT, planned
from tests.support.servers import serving

FULL = bool(os.environ.get("ART_PATCH_FULL"))
pytestmark = [
    pytest.mark.skipif(not FULL, reason="needs AG2's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

PLAN: dict[str, list[Any]] = {
    "gpt-guide": [("ask_painter", {"question": "What colour?"})],
    "gpt-painter": [("look", {"at": "void"}), ("look", {"at": "sky"})],
}
TREES = [
    [
        "agent guide",
        *["  call gpt-guide"] * 2,
        "  tool ask_painter",
        "    agent painter",
        *["      call gpt-painter"] * 3,
        *["      tool look"] * 2,
    ],
    ["agent guide", "  call gpt-guide"],
    ["agent inner", "  call gpt-inner"],
    *[[f"agent {name}", f"  call gpt-{name}"] for name in ("left", "right")],
]


def test_what_an_agent_is_asked_is_one_trajectory(tmp_path: Path):
    python = environment("ag2", ["ag2[openai]>=1.2,<2"])
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned(PLAN)
        told = run_app(python, "ag2_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert "integration ag2" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    guide, again, app, *both = found = trajectories(url)
    assert sorted(call.requested_model for each in found for call in each.calls) == sorted(asked)
    assert [tree(each) for each in (guide, again, app, *sorted(both, key=lambda each: each.info.name or ""))] == TREES
    assert (guide.info.name, again.info.name, app.info.name) == ("guide", "guide", "app")
    assert guide.info.session_id == again.info.session_id is not None
    assert [(span.name, span.attributes, span.error) for span in guide.spans] == [
        ("guide", {"input": "What colour?", "output": TEXT}, None),
        ("ask_painter", {"input": '{"question": "What colour?"}', "output": TEXT}, None),
        ("painter", {"input": "What colour?", "output": TEXT}, None),
        ("look", {"input": '{"at": "void"}'}, "ValueError: there is nothing"),
        ("look", {"input": '{"at": "sky"}', "output": "the sky is blue"}, None),
    ]
