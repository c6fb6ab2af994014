"""The agent's conversation as a trajectory with its reward: what training and evaluation share."""

from __future__ import annotations

from typing import Any

from agent import Problem, is_right, solve

import art_patch as art

NAME = "multiplication"


async def rollout(model: art.Model[Any], problem: Problem) -> art.Trajectory:
    """Let a model solve a problem; the reward is 1 if it is right, else 0."""
    conversation = await solve(model.openai_client(), model.name, problem)
    right = is_right(problem, conversation[-1].message.content or "")
    return art.Trajectory(messages_and_choices=conversation, reward=float(right), metrics={"right": right})
