"""What people say an answer should have been: on its way to the store, and mistakes told at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art_patch.context import correct, trajectory
from art_patch.errors import ConfigError
from art_patch.recording import Recorder
from art_patch.types import Correction, TrajectoryInfo
from tests.support.recordings import Recording

LOOK = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


def test_corrections(seen):
    with trajectory() as run:
        correct("Paris", comment="not Rome")
        correct({"role": "assistant", "content": None, "tool_calls": [LOOK]}, call_id="call-1", correction_id="mine")
    correct("late", trajectory_id=run.id)
    found = seen.of(Correction)
    assert [(c.trajectory_id, c.source, c.message, c.call_id, c.comment) for c in found] == [
        (run.id, "user", {"role": "assistant", "content": "Paris"}, None, "not Rome"),
        (run.id, "user", {"role": "assistant", "tool_calls": [LOOK]}, "call-1", None),
        (run.id, "user", {"role": "assistant", "content": "late"}, None, None),
    ]
    assert found[1].id == "mine"
    assert seen.of(TrajectoryInfo)[0] == run


def test_tool_calls_may_be_written_shortly(seen):
    short = {"tool_calls": [{"function": {"name": "look", "arguments": {"at": "sky"}}}, {"function": {"name": "go"}}]}
    correct(short, trajectory_id="t")
    (correction,) = seen.of(Correction)
    assert correction.message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "go", "arguments": "{}"}},
    ]


def test_what_the_app_changes_afterwards_is_not_recorded(seen):
    parts = [{"type": "text", "text": "right"}]
    correct({"content": parts}, trajectory_id="t")
    parts.clear()
    assert json.dumps(seen.of(Correction)[0].message["content"]) == '[{"type": "text", "text": "right"}]'


WRONG: list[tuple[Any, str]] = [
    ("  ", "what the right answer is"),
    ({}, "what the right answer is"),
    ({"role": "user", "content": "x"}, "assistant's message"),
    ({"content": 3}, "a text or a list of parts"),
    (7, "model_dump"),
    (None, "model_dump"),
    ({"content": "x", "seen": {1}}, "must be JSON"),
    ({"content": "x", "sure": float("nan")}, "must be JSON"),
    ({"tool_calls": {"name": "x"}}, "are a list"),
    ({"tool_calls": ["x"]}, "tool call 1"),
    ({"tool_calls": [LOOK, {"function": {"arguments": "{}"}}]}, "tool call 2"),
    ({"tool_calls": [{"function": {"name": "look", "arguments": "{"}}]}, "'look'"),
    ({"tool_calls": [{"function": {"name": "look", "arguments": [1]}}]}, "'look'"),
]


@pytest.mark.parametrize(("answer", "words"), WRONG)
def test_mistakes_are_told_at_once(answer: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        correct(answer, trajectory_id="t")


def test_without_a_trajectory_there_is_nothing_to_correct():
    with pytest.raises(ConfigError, match=r"no trajectory to correct.*trajectory_id="):
        correct("x")


def test_without_a_patch_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch):
    put: list[Any] = []
    monkeypatch.setattr(Recorder, "put_record", lambda _, record: put.append(record))
    with trajectory():
        correct("x")
    recording = Recording()  # one that comes later is not given what was said before
    assert (put, recording.of(Correction)) == ([], [])
    with trajectory():
        correct("x")
    recording.end()
    assert [record.message["content"] for record in put if isinstance(record, Correction)] == ["x"]
