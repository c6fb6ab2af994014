"""Rollouts as records, and what steps came to."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import art_patch as art
from art_patch.rollouts import history
from art_patch.rollouts.trajectory_group import translate
from tests.support.scripted import choice

USER: Any = {"role": "user", "content": "hi"}
SYSTEM: Any = {"role": "system", "content": "be brief"}


def test_each_choice_is_a_call_with_its_prompt_and_its_tokens():
    run = art.Trajectory(
        messages_and_choices=[SYSTEM, USER, choice("one"), USER, choice("two")],
        reward=0.5,
        metrics={"won": True, "odd": math.nan},
        metadata={"game": 7, "replay": {"target": "os:system"}},  # the latter is not kept: data names no code
        additional_histories=[art.History(messages_and_choices=[USER, {"role": "assistant", "content": "by hand"}])],
    )
    found = translate(
        art.TrajectoryGroup([run], metadata={"scenario_id": 3}), about={"step": 2}, held_out=False, at=20.0
    )
    (recorded,) = found.trajectories
    first, second, other = recorded.calls
    assert [asdict(call) | {"id": ""} for call in recorded.calls[:1]] == [
        {
            "id": "", "trajectory_id": recorded.id, "started_at": 10.0, "requested_model": "agent",
            "messages": (SYSTEM, USER), "tools": (), "params": {"temperature": 0.7}, "span_id": None,
            "choices": (
                {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "stop",
                 "token_ids": (4, 5), "logprobs": (-0.5, -0.5)},
            ),
            "duration_ms": 5.0, "ttft_ms": None, "policy": "agent@0", "prompt_token_ids": (1, 2, 3),
            "prompt_tokens": 3, "completion_tokens": 2, "status": "ok", "error": None, "fallback": None,
            "untrainable": None, "api": "chat", "shadow_of": None, "in_control_group": False,
            "answered_by": None,
        }
    ]  # fmt: skip
    assert len(second.messages) == 4
    assert (other.messages, other.policy, other.untrainable) == ((USER,), None, "answered by upstream")
    assert [(score.name, score.value, score.source) for score in recorded.scores] == [
        ("won", 1.0, "code"), ("reward", 0.5, "code"),
    ]  # fmt: skip
    assert recorded.info.metadata == {"step": 2, "scenario_id": 3, "game": 7}
    assert (found.scenario_key, found.how, found.held_out) == ("scenario:3", "group_key", False)
    assert recorded.info.group_key == found.id
    assert (len(recorded.calls), len(recorded.scores)) == (3, 2)
    assert first.choices[0].token_ids == (4, 5)


def test_a_scenario_without_a_name_is_known_by_its_words():
    def scenario(*contents: str) -> str:
        runs = [
            art.Trajectory(messages_and_choices=[{"role": "user", "content": each}, choice()], reward=1.0)
            for each in contents
        ]
        return translate(art.TrajectoryGroup(runs), about={}, held_out=True, at=1.0).scenario_key

    assert scenario("how many plums?") == scenario("how many plums?", "other") != scenario("how many pears?")
    nothing = art.TrajectoryGroup([art.Trajectory(reward=math.nan)])
    found = translate(nothing, about={}, held_out=True, at=1.0)
    assert found.scenario_key == f"group:{found.id}"
    assert not found.trajectories[0].calls and not found.trajectories[0].scores
    with pytest.raises(art.ConfigError, match="finite"):
        translate(art.TrajectoryGroup([art.Trajectory(reward=math.inf)]), about={}, held_out=False, at=1.0)


def test_what_groups_came_to():
    runs = [art.Trajectory(reward=reward, metrics={"won": reward > 0}) for reward in (0.0, 1.0, math.nan)]
    group = art.TrajectoryGroup([*runs, ValueError("x")])
    assert history.metrics_of([group]) == {
        "won": pytest.approx(1 / 3), "reward": 0.5, "reward_std_dev": pytest.approx(0.5**0.5), "exception_rate": 0.25,
    }  # fmt: skip
    assert history.metrics_of([]) == {}


def test_the_best_step_is_that_with_the_highest_mean_and_the_later_of_equal_ones(tmp_path: Path):
    assert history.best_step(tmp_path, "val/reward", [0, 1]) is None
    for step, reward in ((0, 1.0), (1, 3.0), (1, 0.0), (2, 1.5), (3, 9.0)):
        history.note(tmp_path, step=step, split="val", metrics={"reward": reward}, at=1.0)
    with (tmp_path / history.HISTORY).open("a") as file:
        file.write('{"step": 0, "val/rew')
    assert history.best_step(tmp_path, "val/reward", [0, 1, 2]) == 2
    assert history.best_step(tmp_path, "val/other", [0, 1, 2]) is None
