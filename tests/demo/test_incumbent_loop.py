"""The world of the benchmark `incumbent.py`: its provider is right as often as the figures assume."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from art_patch.demo.shop import Task, is_success, make_tasks, run_tool
from tests.benchmarks import incumbent_drift
from tests.benchmarks.incumbent_loop import WINDOW, take_over, worst
from tests.benchmarks.incumbent_world import DATED, RIGHT, Provider, bot


def conversation(provider: Provider, task: Task) -> list[dict[str, object]]:
    messages = [*task.messages]
    messages.append(provider.answer(messages)["choices"][0]["message"])
    function = messages[-1]["tool_calls"][0]["function"]
    price = run_tool(task, function["name"], function["arguments"])
    messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": price})
    messages.append(provider.answer(messages)["choices"][0]["message"])
    return messages


def test_the_provider_is_right_as_often_as_the_figures_assume():
    provider = Provider(1, delay_s=0.0)
    try:
        tasks = make_tasks("traffic", 6_000, seed=1)
        right = sum(is_success(task, conversation(provider, task)) for task in tasks) / len(tasks)
        assert abs(right - RIGHT) < 0.012  # three standard errors
        assert provider.answer(tasks[0].messages)["model"] == DATED
    finally:
        provider.close()


def test_the_worst_window_is_the_worst_and_not_the_first():
    assert worst([0.0] * 500 + [-0.5] * WINDOW + [1.0] * 500) == -0.5
    assert worst([0.5, -0.5]) == 0.0


def test_the_bot_names_its_sessions_and_rewards_them():
    source = bot().source
    assert 'session_id=task["session"]' in source
    assert '"messages": session(task)' in source


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("ART_PATCH_FULL" not in os.environ, reason="takes minutes; ART_PATCH_FULL=1 runs it")
def test_a_policy_that_takes_over_answers_every_call(tmp_path: Path):
    figures = take_over(tmp_path, 1, count=30)
    assert (figures["take_over"], figures["take_over_calls"], figures["take_over_fell_back"]) == (1.0, 60, 0)


def test_no_comparison_uses_a_model_that_upstream_no_longer_has(tmp_path: Path):
    found = incumbent_drift.alias_drift(tmp_path)
    assert found["alias_drift"] == 0
    assert found["alias_drift_later"] >= 20  # of the held-out prompts, which are the fewest
