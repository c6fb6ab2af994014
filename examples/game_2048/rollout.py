"""A game of the agent as a trajectory with its reward: what training and evaluation share."""

from __future__ import annotations

import argparse
import math
from typing import Any

from agent import Played, play
from game import Game

import art_patch as art
from art_patch.demo.example_script import shared_options

NAME = "game_2048"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that training and evaluation share."""
    shared_options(parser)
    parser.add_argument("--limit", type=int, default=30, help="moves of a game (%(default)s)")


async def rollout(model: art.Model[Any], game: Game, limit: int) -> art.Trajectory:
    """Let a model play a game of at most `limit` moves; each move is a history of its own, and all share the reward."""
    played = await play(model.openai_client(), model.name, game, limit)
    first, *others = played.conversations
    return art.Trajectory(
        messages_and_choices=first,
        additional_histories=[art.History(messages_and_choices=each) for each in others],
        reward=reward(played),
        metrics={
            "score": played.game.score,
            "max_tile": played.game.max_tile,
            "moves": played.game.moves,
            "illegal": played.illegal,
        },
        metadata={"scenario_id": game.seed},
    )


def reward(played: Played) -> float:
    """Powers of two in the score, as a late merge is worth as much as all before it; one less for an illegal end."""
    return math.log2(1 + played.game.score) - played.illegal
