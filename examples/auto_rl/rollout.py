"""The agent's conversation as a trajectory, and policies judged side by side: what training and evaluation share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from agent import answer
from roles import Judge

import art_patch as art


async def rollout(model: art.Model[Any], system_prompt: str, question: str) -> art.Trajectory:
    """Let a model answer a question; the reward is not known until the judge has seen its siblings."""
    conversation = await answer(model.openai_client(), model.name, system_prompt, question)
    words = len((conversation[-1].message.content or "").split())
    return art.Trajectory(
        messages_and_choices=conversation, reward=float("nan"), metrics={"words": words}, metadata={"model": model.name}
    )


async def side_by_side(
    models: Sequence[art.Model[Any]], system_prompt: str, questions: Sequence[str], judge: Judge, *, runs: int
) -> art.Evaluation:
    """Let models answer the same questions; the judge sees all answers to one at once, and not whose they are.

    Its scores compare what it sees at once, so a model's mean means something beside the others' of the same call only.
    """
    judged = await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(rollout(model, system_prompt, question) for model in models for _ in range(runs))
            for question in questions
        ),
        pbar_desc="answer and judge",
        after_each=judge,
    )
    found: dict[tuple[str, str], list[art.Trajectory]] = defaultdict(list)
    for question, group in zip(questions, judged, strict=True):
        for run in group:
            found[run.metadata["model"], question].append(run)

    async def look_up(model: art.Model[Any], question: str) -> art.Trajectory:
        return found[model.name, question].pop()

    return await art.evaluate(look_up, questions, models, runs=runs, pbar_desc=None)
