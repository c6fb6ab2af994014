"""Haystack by its tracer: a run of a pipeline or agent is one trajectory, with components, retrievals and tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.replies import reply
from tests.support.servers import serving

FULL = bool(os.environ.get("ART_PATCH_FULL"))
pytestmark = [
    pytest.mark.skipif(not FULL, reason="needs Haystack's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

FACTS = ["span facts", "  retrieval find", "  span llm", "    call gpt-pipeline", "  span prompt"]


def agent(model: str, *, oldest: bool) -> list[str]:
    """Lines of an agent that looks once."""
    if oldest:
        return ["agent Agent", *["  span chat_generator", f"    call {model}"] * 2, "  tool tool_invoker"]
    return ["agent Agent", *[f"  call {model}"] * 2, "  tool look"]


@pytest.mark.parametrize("wanted", [["haystack-ai==2.20.0"], ["haystack-ai>=3.4,<4"]], ids=["oldest", "newest"])
def test_a_run_is_one_trajectory(tmp_path: Path, wanted: list[str]):
    python = environment("haystack-ai", wanted)
    oldest = "==" in wanted[0]
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = reply
        told = run_app(python, "haystack_app.py", url, server.url)
    assert "integration haystack.tracing.tracer" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    found = trajectories(url)
    inside = ["span Pipeline", "  span painter", *(f"    {line}" for line in agent("gpt-inside", oldest=oldest))]
    assert [tree(each) for each in found] == [
        FACTS, agent("gpt-agent", oldest=oldest), agent("gpt-async", oldest=oldest), inside,
    ]  # fmt: skip
    assert [each.info.name for each in found] == ["facts", "Agent", "Agent", "app"]
    find = next(span for span in found[0].spans if span.kind == "retrieval")
    assert find.attributes["input"]["query"] == "sky"
    assert "The sky is blue." in str(find.attributes["output"])
    for each in found[1:]:
        [tool] = (span for span in each.spans if span.kind == "tool")
        assert "the sky is blue" in str(tool.attributes["output"]) and tool.error is None
        if not oldest:
            assert tool.attributes == {"input": {"at": "sky"}, "output": "the sky is blue"}
    assert all(span.attributes == {} for span in found[0].spans if span.kind != "retrieval")
