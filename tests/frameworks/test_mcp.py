"""MCP: what a tool of a local server returned is in the step of the call, with the server's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.environments import environment, run_app
from tests.support.recorded import store_url, trajectories, tree
from tests.support.replies import planned
from tests.support.servers import serving

FULL = bool(os.environ.get("ART_PATCH_FULL"))
pytestmark = [
    pytest.mark.skipif(not FULL, reason="needs MCP's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

WANTED = ["pydantic-ai-slim[openai,mcp]>=2.68,<3", "opentelemetry-sdk>=1.45,<2"]
TREE = [
    "agent Painter",
    *["  call gpt-painter"] * 3,
    *["  tool look", "    tool look"] * 2,
]


def test_a_tool_of_a_server(tmp_path: Path):
    python = environment("pydantic-ai", WANTED)
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned({"gpt-painter": [("look", {"at": "void"}), ("look", {"at": "sky"})]})
        told = run_app(python, "mcp_app.py", url, server.url)
    assert "integration mcp.client.session" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    [found] = trajectories(url)
    assert tree(found) == TREE
    [failed, looked] = [span for span in found.spans if span.attributes.get("mcp_server")]
    assert (failed.attributes["mcp_server"], failed.error) == ("eyes", "Error executing tool look")
    assert looked.attributes == {"input": {"at": "sky"}, "mcp_server": "eyes", "output": "the sky is blue"}
    assert looked.error is None
