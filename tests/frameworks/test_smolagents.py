"""smolagents: a run of an agent is a trajectory, with tools, code and managed agents."""

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
    pytest.mark.skipif(not FULL, reason="needs smolagents's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

DONE = ("final_answer", {"answer": "done"})
PLAN: dict[str, list[Any]] = {
    "gpt-guide": [("painter", {"task": "Paint."}), DONE],
    "gpt-painter": [("look", {"at": "void"}), ("look", {"to": "sky"}), ("look", {"at": "sky"}), DONE],
    "gpt-coder": [
        "No code.",
        "<code>\nlook(at='sea')\nlook(at='void')\n</code>",
        "<code>\nfinal_answer('red')\n</code>",
        "<code>\nfinal_answer('blue')\n</code>",
    ],
    **{f"gpt-{name}": [DONE] for name in ("inner", "left", "right")},
}
TREES = {
    "guide": [
        "agent guide",
        "  agent painter",
        *["    call gpt-painter"] * 4,
        "    tool look",
        "    tool look",
        "      call gpt-eye",
        *["  call gpt-guide"] * 2,
    ],
    "coder": [
        "agent coder",
        *["  call gpt-coder"] * 4,
        "  tool python_interpreter",
        "    tool look",
        "      call gpt-eye",
        "    tool look",
        *["  tool python_interpreter"] * 2,
    ],
    "app": ["agent inner", "  call gpt-inner"],
    "left": ["agent left", "  call gpt-left"],
    "right": ["agent right", "  call gpt-right"],
}


def test_a_run_is_one_trajectory(tmp_path: Path):
    python = environment("smolagents", ["smolagents[openai]>=1.26,<2"])
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned(PLAN)
        told = run_app(python, "smolagents_app.py", url, server.url)
        asked = [seen.body["model"] for seen in server.seen]
    assert "integration smolagents" in told["instrumented"]
    assert (told["errors"], told["bypasses"]) == ({}, {})
    everything = trajectories(url)
    assert sorted(call.requested_model for each in everything for call in each.calls) == sorted(asked)
    assert {tuple(tree(each)) for each in everything if each.info.name is None} == {("call gpt-reader",)}
    found = {each.info.name: each for each in everything if each.info.name is not None}
    assert {name: tree(each) for name, each in found.items()} == TREES
    blue, nothing = "the sea is blue", "ValueError: there is nothing"
    ran = "Execution logs:\nLast output from code snippet:\n"
    code = "look(at='sea')\nlook(at='void')"
    assert [(span.name, span.attributes, span.error) for span in found["coder"].spans] == [
        ("coder", {"input": "Write.", "output": "blue"}, None),
        ("python_interpreter", {"input": code}, f"Code execution failed at line 'look(at='void')' due to: {nothing}"),
        ("look", {"input": {"at": "sea"}, "output": blue}, None),
        ("look", {"input": {"at": "void"}}, nothing),
        *(
            ("python_interpreter", {"input": f"final_answer('{it}')", "output": ran + it}, None)
            for it in ("red", "blue")
        ),
    ]
    scores = [(each.info.name, score.name, score.value) for each in found.values() for score in each.scores]
    assert scores == [("guide", "valid", 0.0), ("coder", "valid", 0.0), ("coder", "valid", 0.0)]
    refused = [score.comment or "" for score in found["coder"].scores]
    assert "code parsing" in refused[0] and refused[1].startswith("Check <lambda> failed")
