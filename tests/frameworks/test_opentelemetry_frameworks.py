"""Frameworks that tell of agents and tools by OpenTelemetry themselves: their probes, and what their spans become."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.catalog import FRAMEWORKS
from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.replies import reply
from tests.support.servers import serving

FULL = bool(os.environ.get("ART_PATCH_FULL"))
pytestmark = [
    pytest.mark.skipif(not FULL, reason="needs the frameworks' packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

BLUE = "the sky is blue"


def looking(model: str, agent: str, tool: str = "look") -> list[str]:
    """An agent that looks once."""
    return [f"agent {agent}", *[f"  call {model}"] * 2, f"  tool {tool}"]


def below(step: str, lines: list[str]) -> list[str]:
    """Lines below a step."""
    return [step, *(f"  {line}" for line in lines)]


TREES: dict[str, dict[str, list[str]]] = {
    "Agno": {
        "gpt-chat": ["agent Painter", "  call gpt-chat"],
        **{name: looking(name, "Painter") for name in ("gpt-tools", "gpt-async-stream", "gpt-responses-tools")},
        "gpt-team": looking("gpt-team", "Team.run", "delegate_task_to_member"),
    },
    "Semantic Kernel": {
        "gpt-chat": ["call gpt-chat"],
        "gpt-agent": looking("gpt-agent", "Painter", "Eyes-look"),
        "gpt-agent-stream": looking("gpt-agent-stream", "Painter", "Eyes-look"),
        "gpt-responses": ["agent Painter", "  call gpt-responses"],
    },
    "Strands": {
        name: looking(name, "Strands Agents")
        for name in ("gpt-agent", "gpt-async", "gpt-stream", "gpt-responses", "gpt-litellm")
    },
    "Google ADK": {
        "gpt-tools": below("agent painter", looking("gpt-tools", "painter")),
        "gpt-stream": below("agent painter", looking("gpt-stream", "painter")),
        "gpt-first": below(
            "agent both", below("agent both", ["agent a", "  call gpt-first", "agent b", "  call gpt-second"])
        ),
    },
    "Microsoft Agent Framework": {
        "gpt-tools": looking("gpt-tools", "Painter"),
        "gpt-stream": looking("gpt-stream", "Painter"),
        "gpt-responses": looking("gpt-responses", "Painter"),
        "gpt-first": below(
            "agent both",
            [*below("node A", ["agent A", "  call gpt-first"]), *below("node B", ["agent B", "  call gpt-second"])],
        ),
    },
}
RESULTS: dict[str, dict[str, Any]] = {
    "Agno": {"input": '{"at": "sky"}', "output": BLUE},
    "Semantic Kernel": {"input": '{"at": "sky"}', "output": BLUE, "call_id": "call_1"},
    "Strands": {"input": '{"at": "sky"}', "output": f'[{{"text": "{BLUE}"}}]', "call_id": "call_1"},
    "Google ADK": {"input": '{"at": "sky"}', "output": f'{{"result": "{BLUE}"}}', "call_id": "call_1"},
    "Microsoft Agent Framework": {"input": '{"at": "sky"}', "output": BLUE, "call_id": "call_1"},
}


@pytest.mark.parametrize("name", TREES)
def test_spans_become_steps(tmp_path: Path, name: str):
    framework = next(each for each in FRAMEWORKS if each.name == name)
    python = environment(framework.package, framework.newest)
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = reply
        told = run_app(python, f"probes/{framework.probe}_probe.py", url, server.url)
    assert "integration opentelemetry.sdk.trace" in told["instrumented"]
    assert told["errors"] == {}
    found = {each.calls[0].requested_model.rpartition("/")[2]: each for each in trajectories(url)}
    shown = {model: [line.replace("openai/", "") for line in tree(each)] for model, each in found.items()}
    assert {model: shown[model] for model in TREES[name]} == TREES[name]
    tools = [span.attributes for each in found.values() for span in each.spans if span.kind == "tool"]
    assert RESULTS[name] in tools
    if name in ("Agno", "Google ADK"):
        assert all(each.info.session_id for each in found.values())
