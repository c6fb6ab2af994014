"""Trajectories and groups: what they hold, and what is kept of rollouts that raise."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import art_patch as art
from art_patch.trajectories import exact_of
from art_patch.trajectories.trainability import Exact
from tests.support.scripted import choice

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USER = {"role": "user", "content": "hi"}


def made(**more: Any) -> art.Trajectory:
    return art.Trajectory(messages_and_choices=[USER, choice("", tool_calls=[CALL])], reward=0.5, **more)


def test_a_choice_becomes_a_message_and_other_messages_stay():
    assert made().messages() == [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def test_a_choice_carries_its_tokens_and_the_caller_does_not_see_them():
    mine = choice()
    assert exact_of(mine) == Exact("agent@0", 10.0, 5.0, {"temperature": 0.7}, (1, 2, 3), (4, 5), (-0.5, -0.5), 3)
    assert (mine.logprobs, mine.model_extra) == (None, {"art_patch": mine.art_patch})  # type: ignore[attr-defined]
    assert exact_of(Choice.model_validate(mine.model_dump() | {"art_patch": None})) is None


@pytest.mark.parametrize("reward", [0.5, math.nan])
def test_what_was_written_as_json_is_read_back_with_its_tokens(reward: float):
    before = made(metrics={"won": True}, metadata={"game": 7}, tools=[{"type": "function"}])
    before.reward = reward
    before.additional_histories.append(art.History(messages_and_choices=[USER, choice("two")]))
    after = art.Trajectory.model_validate_json(before.model_dump_json())
    assert after.model_dump_json() == before.model_dump_json()
    assert [exact_of(each) for each in after.choices()] == [exact_of(each) for each in before.choices()]
    assert len(after.choices()) == 2


def test_lines_durations_and_what_people_are_shown():
    trajectory = made()
    trajectory.log("began")
    assert trajectory.finish() is trajectory
    assert trajectory.metrics["duration"] >= 0
    assert [message["trainable"] for message in trajectory.for_logging()["messages"]] == [False, True]
    assert trajectory.for_logging()["logs"] == ["began"]
    assert str(made(metrics={"won": 1})) == "Trajectory(reward=0.5, metrics={'won': 1}, metadata={})"


async def _tracked() -> art.Trajectory:
    trajectory = made()
    for _ in range(2):
        async with trajectory.track_duration("tool"):
            pass
    return trajectory


def test_a_class_of_the_users_own_is_a_trajectory():
    class Mine(art.Trajectory):
        answer: str | None = None

    group = art.TrajectoryGroup([Mine(reward=1.0, answer="42")], metadata={"scenario_id": "s"}, logs=["one"])
    (only,) = group
    assert isinstance(only, Mine)
    assert (only.answer, len(group), group.metadata, group.logs) == ("42", 1, {"scenario_id": "s"}, ["one"])


def test_a_group_keeps_exceptions_in_the_place_of_trajectories():
    group = art.TrajectoryGroup([made(), ValueError("no board")], exceptions=[KeyError("x")])
    assert len(group) == 1
    assert [(each.type, each.message) for each in group.exceptions] == [("ValueError", "no board"), ("KeyError", "'x'")]
    again = art.TrajectoryGroup.model_validate_json(group.model_dump_json())
    assert again.model_dump_json() == group.model_dump_json()


def test_a_text_is_no_history():
    with pytest.raises(ValueError, match="list of messages"):
        art.Trajectory(messages_and_choices="hi", reward=0.0)  # type: ignore[arg-type]
