"""A game as a trajectory with its reward: what training and evaluation share.

Each move is a conversation of its own, and all of them share the game's reward: the spymaster learns clues that the
guesser understands, the guesser learns what the spymaster means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent import play
from game import FULL, SMALL, Board, Size, beginner

import art_patch as art
from art_patch.demo.tiny_model import Shape, tiny_base

NAME = "codenames"


async def rollout(model: art.Model[Any], board: Board) -> art.Trajectory:
    """Let a model play a board in both roles."""
    end, moves = await play(model.openai_client(), model.name, board)
    first, *others = moves
    return art.Trajectory(
        messages_and_choices=first,
        additional_histories=[art.History(messages_and_choices=move) for move in others],
        reward=end.reward,
        metrics={"found": len(end.team & end.open) / len(end.team), "assassin": end.killed, "won": not end.left},
    )


def learner(base_model: str | None, seed: int) -> tuple[art.TrainableModel, Size]:
    """The model that learns, and the size of its boards: the tiny stand-in on small ones unless a base is named."""
    base = base_model or str(_tiny(seed))
    model = art.TrainableModel(name=NAME, project=f"{NAME}-{seed}", base_model=base)
    return model, FULL if base_model else SMALL


def _tiny(seed: int) -> Path:
    words = [*SMALL.vocabulary, *(word for words in SMALL.vocabulary.values() for word in words)]
    return tiny_base(NAME, beginner, seed=seed, words=words, shape=Shape(steps=1000, batch=48, peak_lr=3e-3))
