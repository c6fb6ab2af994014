"""A match as a trajectory with its reward: what training and evaluation share.

Each of the agent's moves is a history of the trajectory, and all of them share its reward. The opponent's moves are not
in it, though the opponent may be the same policy.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from agent import cell_of, choose
from game import at_random, free_cells, is_over, moved, side_to_move, winner
from matches import Match

import art_patch as art

NAME = "tic_tac_toe"
REWARDS = {"wins": 1.0, "draws": 0.5, "losses": 0.0, "illegal": -0.5}

Opponent = Callable[[str], Awaitable[int | None]]
"""Answers a board with a cell."""


async def rollout(model: art.Model[Any], match: Match, opponent: art.Model[Any] | None = None) -> art.Trajectory:
    """Let a model play a match.

    Args:
        model: plays the side that moves first.
        match: where it begins.
        opponent: plays the other side; a random player unless given.
    """
    board, agent, rng = match.opening, side_to_move(match.opening), random.Random(match.seed)
    moves: list[list[Any]] = []
    while not is_over(board):
        if side_to_move(board) == agent:
            moves.append(await choose(model.openai_client(), model.name, board))
            cell = cell_of(moves[-1][-1].message.content)
        elif opponent is None:
            cell = at_random(board, rng)
        else:
            *_, choice = await choose(opponent.openai_client(), opponent.name, board)
            cell = cell_of(choice.message.content)
        if cell not in free_cells(board):
            break
        board = moved(board, cell)
    end = _end(board, agent)
    good = end in ("wins", "draws")
    ends = {name: end == name for name in REWARDS}
    first, *rest = moves
    return art.Trajectory(
        messages_and_choices=first,
        additional_histories=[art.History(messages_and_choices=move) for move in rest],
        reward=REWARDS[end],
        metrics={"win_or_draw": good, f"against_{match.opponent}": good, **ends},
        metadata={"side": agent, "opponent": match.opponent},
    )


def _end(board: str, agent: str) -> str:
    """How a game ended for the agent; one that is not over ended because whose turn it is took no free cell."""
    if not is_over(board):
        return "illegal" if side_to_move(board) == agent else "wins"
    return {None: "draws", agent: "wins"}.get(winner(board), "losses")
