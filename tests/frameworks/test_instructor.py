"""Instructor by its hooks: a question and its repetitions are one trajectory, scored by what was refused."""

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
    pytest.mark.skipif(not FULL, reason="needs Instructor's packages; ART_PATCH_FULL=1 runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

MANY, THREE = ("Count", {"n": "many"}), ("Count", {"n": 3})
PLAN: dict[str, list[Any]] = {
    "gpt-again": [MANY, THREE],
    "gpt-async": [MANY, THREE],
    "gpt-never": [MANY, MANY],
    "gpt-app": [MANY, THREE],
    "gpt-unpatched": [THREE],
}


@pytest.mark.parametrize("wanted", [["instructor==1.13.0"], ["instructor>=1.17,<2"]], ids=["oldest", "newest"])
def test_a_question_is_one_trajectory(tmp_path: Path, wanted: list[str]):
    python = environment("instructor", wanted)
    url = store_url(tmp_path)
    with serving() as server:
        server.answer = planned(PLAN)
        told = run_app(python, "instructor_app.py", url, server.url)
    assert any(door.startswith("integration instructor.") for door in told["instrumented"])
    assert (told["errors"], told["bypasses"], told["refused"]) == ({}, {}, 4)
    again, awaited, never, app = found = trajectories(url)
    assert [tree(each) for each in found] == [
        ["call gpt-again"] * 2, ["call gpt-async"] * 2, ["call gpt-never"] * 2,
        ["call gpt-app"] * 2 + ["call gpt-plain"],
    ]  # fmt: skip
    assert [each.info.name for each in found] == ["Count", "Count", "Count", "app"]
    assert [[(score.name, score.value) for score in each.scores] for each in found] == [
        [("valid", 0.0)], [("valid", 0.0)], [("valid", 0.0)] * 2, [("valid", 0.0)],
    ]  # fmt: skip
    assert "valid integer" in (again.scores[0].comment or "")
    assert [each.info.error is None for each in (again, awaited, never, app)] == [True, True, False, True]
