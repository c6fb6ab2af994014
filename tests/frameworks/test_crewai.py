"""CrewAI by the events of its bus: crews, flows and agents are trajectories, with all that happens inside."""

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
    pytest.mark.skipif(not FULL, reason="needs CrewAI's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

PLAN: dict[str, list[Any]] = {
    "gpt-painter": [("look", {"at": "void"}), ("look", {"at": "sky"})],
    "gpt-critic": ["red", "blue"],
    "gpt-loner": [("look", {"at": "sea"})],
}

TREES = {
    "gallery": [
        "agent gallery",
        "  node judge",
        *["    agent Critic", "      call gpt-critic"] * 2,
        *["    guardrail polite"] * 2,
        "  node paint",
        "    agent Painter",
        *["      call gpt-painter"] * 3,
        *["      tool look"] * 2,
    ],
    "Visit": [
        "agent Visit",
        "  node greet",
        "  node show",
        "    agent inner",
        "      node help",
        "        agent Helper",
        "          call gpt-helper",
    ],
    "Broken": ["agent Broken", "  node fail", "    agent Faller", "      call gpt-faller"],
    "failing": [
        "agent failing",
        "  node fall",
        "    agent Faller",
        "      call gpt-faller",
        "    guardrail break_down",
    ],
    "app": ["agent Loner", *["  call gpt-loner"] * 2, "  tool look"],
    None: ["call gpt-loner"],
}


def test_a_run_is_one_trajectory(tmp_path: Path):
    python = environment("crewai", ["crewai[litellm]>=1.15,<2"])
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned(PLAN)
        told = run_app(python, "crewai_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert "integration crewai.events.event_bus" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    found = {each.info.name: each for each in trajectories(url)}
    assert sorted(call.requested_model for each in found.values() for call in each.calls) == sorted(asked)
    assert {name: tree(each) for name, each in found.items()} == TREES
    gallery, visit, broken = found["gallery"], found["Visit"], found["Broken"]
    assert (visit.info.session_id, broken.info.error) == ("visit-1", "broken")
    assert found["failing"].info.error == "broken guardrail"
    assert {(span.name, span.error): span.attributes for span in gallery.spans if span.kind != "agent"} == {
        ("paint", None): {"output": "Hello there!"},
        ("look", "there is nothing"): {"input": {"at": "void"}},
        ("look", None): {"input": {"at": "sky"}, "output": "the sky is blue"},
        ("judge", None): {"output": "blue"},
        ("polite", "say blue"): {},
        ("polite", None): {"output": "blue"},
    }
    assert gallery.spans[0].attributes == {"input": {"colour": "blue"}, "output": "blue"}
    scores = [
        (each.info.name, score.name, score.value, score.comment) for each in found.values() for score in each.scores
    ]
    assert scores == [
        ("gallery", "guardrail", 0.0, "say blue"),
        ("failing", "guardrail", 0.0, "RuntimeError: broken guardrail"),
    ]
