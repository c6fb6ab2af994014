"""Rows of the tables, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

from art_patch.trackers import Episode
from art_patch.trackers.episodes import ActionTable, episode_row
from art_patch.types import SpanInfo, Trajectory, TrajectoryInfo
from tests.support.factory import make_call, make_trajectory
from tests.support.run_samples import tool_run


def test_a_run_is_a_row():
    about = {"user_id": "u", "session_id": "s", "scenario_key": "plum", "tags": ("a", "b"), "name": "fruit"}
    row = ("t", "fruit", "1970-01-01T00:16:40+00:00", 1.5, "agent@1", 2, 6, 6, 1)
    assert episode_row(Episode(tool_run("t", "plum", "x", **about), 0.5), content=False) == (
        *row, 0.5, False, None, "plum", "s", "u", "a, b",
    )  # fmt: skip
    broken = make_trajectory("e", make_call("c", policy=None, status="error", error="APITimeoutError"))
    *_, failed, error, task, session, user, tags = episode_row(Episode(broken), content=False)
    assert (failed, error, task, session, user, tags) == (True, "APITimeoutError", None, None, None, "")


def test_what_was_said_is_in_the_row_if_asked_for():
    *_, asked, answered = episode_row(Episode(make_trajectory()), content=True)
    assert json.loads(str(asked)) == [{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]
    assert json.loads(str(answered))[0]["parts"] == [{"type": "text", "content": "yo"}]
    assert episode_row(Episode(Trajectory(TrajectoryInfo("t", 1.0), ())), content=True)[-2:] == (None, None)


def test_a_tool_is_a_row_with_what_came_of_it():
    good, bad = tool_run("good", "plum", "x"), tool_run("bad", "plum", "x")
    results = (
        SpanInfo("1", "good", "lookup", 1.0, ended_at=2.0, kind="tool", attributes={"output": "31 cents"}),
        SpanInfo("2", "good", "lookup", 2.0, ended_at=3.0, kind="tool", error="KeyError"),
        SpanInfo("3", "good", "never asked for", 2.0, ended_at=3.0, kind="tool"),
        SpanInfo("4", "good", "lookup", 3.0, kind="tool"),
        SpanInfo("5", "good", "planner", 3.0, ended_at=3.0, kind="agent"),
    )
    actions = ActionTable()
    for episode in (Episode(replace(good, spans=results), 1.0), Episode(bad, 0.5), Episode(make_trajectory())):
        actions.add(episode)
    assert actions.rows() == [
        ("lookup", 2, 1.0, 2, 2, 1, 0.5, 0.75),
        ("never asked for", 0, 0.0, 0, 1, 0, 1.0, None),
    ]
    assert ActionTable().rows() == []
