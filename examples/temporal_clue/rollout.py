"""The detective's conversation as a trajectory with its reward: what training and evaluation share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent import share_right, solve
from puzzles import FULL, HOURS, ROOMS, SMALL, SUSPECTS, WEAPONS, Puzzle, Size, beginner

import art_patch as art
from art_patch.demo.tiny_model import Shape, tiny_base

NAME = "temporal_clue"


async def rollout(model: art.Model[Any], puzzle: Puzzle) -> art.Trajectory:
    """Let a model solve a puzzle; the reward is the share of right parts: half a solution is worth something."""
    conversation = await solve(model.openai_client(), model.name, puzzle)
    right = share_right(puzzle, conversation[-1].message.content or "")
    return art.Trajectory(
        messages_and_choices=conversation, reward=right, metrics={"right": right, "solved": right == 1.0}
    )


def learner(base_model: str | None, seed: int) -> tuple[art.TrainableModel, Size]:
    """The model that learns, and the size of its puzzles: the tiny stand-in on small ones unless a base is named."""
    base = base_model or str(_tiny(seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{seed}", base_model=base)
    return model, FULL if base_model else SMALL


def _tiny(seed: int) -> Path:
    words = (*SUSPECTS, *ROOMS, *HOURS, *WEAPONS)
    return tiny_base(NAME, beginner, seed=seed, words=words, shape=Shape(steps=1000, batch=48, peak_lr=3e-3))
