"""What came of the runs: metrics worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.insights import Analytics, analyse
from art_patch.insights.analytics import Action, ErrorPattern, Outcomes, pattern_of
from art_patch.store import open_store
from art_patch.trackers import Episode
from art_patch.types import Trajectory, TrajectoryInfo
from tests.support.factory import make_call, make_trajectory
from tests.support.run_samples import fill, tool_run


def test_runs_are_counted_by_what_is_known_of_them():
    broken = make_call("c", status="error", error="APITimeoutError: after 30 s")
    other = make_call("c2", policy=None, status="error", error="APITimeoutError: after 7 s")
    found = analyse(
        [
            Episode(tool_run("good", "plum", "x"), 0.5),
            Episode(tool_run("bad", "plum", "x"), 0.25),
            Episode(make_trajectory("unknown")),
            Episode(make_trajectory("lucky", broken), 1.0),
            Episode(make_trajectory("mixed", broken, other)),
            Episode(Trajectory(TrajectoryInfo("raised", 1.0, error="KeyError: 'plum'"), ())),
        ],
        success_at=0.5,
    )
    assert found == Analytics(
        Outcomes(6, 3, 3, 1, 1 / 5, 1.75 / 3, 8 / 6),
        {"agent@0": Outcomes(2, 1, 1, 0, 0.0, 1.0, 1.0), "agent@1": Outcomes(2, 2, 0, 1, 0.5, 0.375, 2.0)},
        (Action("lookup", 2, 2, 1.0),),
        (ErrorPattern("APITimeoutError: after # s", 3, 2, "lucky"), ErrorPattern("KeyError: #", 1, 1, "raised")),
    )


def test_nothing_is_not_zero():
    assert analyse([], success_at=0.5) == Analytics(Outcomes())


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        ("BadRequestError: 400 for req_01f9c0de77 of \"gpt-5\"\nand more", "BadRequestError: # for # of #"),
        ("run 0196d2f0a1b27c3d8e4f5a6b7c8d9e0f is gone", "run # is gone"),
        ("  \n", ""),
    ],
)  # fmt: skip
def test_a_pattern_is_an_error_without_what_varies(error: str, pattern: str):
    assert pattern_of(error) == pattern


@given(st.text(max_size=400))
def test_any_error_has_a_short_pattern(error: str):
    assert len(pattern_of(error)) <= 160 and "\n" not in pattern_of(error)


def test_the_command_says_it_as_text_and_as_json(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    fill(store)
    store.close()
    words = ["analytics", "--home", str(tmp_path)]
    facts = json.loads(CliRunner().invoke(app, [*words, "--json", "--name", "fruit"]).stdout)
    assert facts["overall"] == {
        "runs": 6, "judged": 6, "failed": 0, "succeeded": 4, "success_rate": 4 / 6,
        "mean_reward": pytest.approx(1.85 / 3), "mean_steps": 2.0,
    }  # fmt: skip
    assert facts["actions"] == [{"name": "lookup", "times": 6, "runs": 6, "share": 1.0}]
    text = CliRunner().invoke(app, words, env={"COLUMNS": "100"}).stdout
    assert text.splitlines()[1].split() == ["all", "9", "1", "6", "57%", "0.62", "1.56"]
    assert "lookup" in text and "APITimeoutError" in text and "ValueError: no" in text
    assert "no run matches" in CliRunner().invoke(app, [*words, "--name", "none"]).stdout
