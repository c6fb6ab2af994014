"""Which games are played to learn and to be examined, and how a beginner plays.

A match is an opening, the kind of opponent that the agent meets from there on, and a seed of the opponent's luck.
Training begins at random positions of every depth: a late one tells at once which move was good. The examination begins
at an empty board, and its random player draws from seeds of its own, which no seed of training moves.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import QUESTION, RULES, prompt
from game import EMPTY, LINES, at_random, completing, free_cells, is_over, moved, other, side_to_move

from art_patch.demo.tiny_model import Shape, tiny_base

OPPONENTS = ("itself", "itself", "earlier", "random")
"""Whom the agent learns from: the policy as it is, a former one that it must not forget how to beat, and chance."""

_DEPTHS = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7)
"""Moves that an opening has; more often many, as there is more to see then, and less luck until the end."""

_P_SENSIBLE, _P_FIRST = 0.35, 0.45
"""Of a beginner's moves: one that looks ahead, and the first free cell. The others are the centre, free or taken."""


@dataclass(frozen=True)
class Match:
    """What siblings share.

    Attributes:
        opening: the board; the agent moves next, so it says which side is the agent's.
        opponent: one of `OPPONENTS`.
        seed: of a random opponent's moves.
    """

    opening: str
    opponent: str
    seed: str


def lessons(count: int, seed: str) -> list[Match]:
    """Matches to learn from, drawn anew for each seed; all opponents and depths in turn."""
    rng = random.Random(seed)
    kinds = [OPPONENTS[number % len(OPPONENTS)] for number in range(count)]
    return [Match(_position(rng, rng.choice(_DEPTHS)), kind, f"{seed} {number}") for number, kind in enumerate(kinds)]


def held_out(count: int = 200) -> list[Match]:
    """The examination: games against a random player, who answers one half of them and opens the other."""
    return list(_held_out(count))


def tiny(seed: int) -> Path:
    """A stand-in for a base model, for whoever has no GPU: it knows the board, and mostly plays anywhere on it."""
    seen = itertools.product(("", "X", "O"), repeat=3)
    lines = ["\n" + " ".join(map("{}{}".format, marks, line)) for marks in seen for line in LINES]
    # A token each: a line of the board, a cell of an answer, a sentence that never changes. What a large model puts
    # together while it reads, one of two layers is given.
    words = [*lines, *(f" {cell}" for cell in range(1, 10)), RULES, QUESTION]
    return tiny_base("tic_tac_toe", _beginner, seed=seed, words=words, shape=Shape(steps=1000, batch=48))


def _held_out(count: int) -> Iterator[Match]:
    for number in range(count):
        seed = f"held out {number}"
        board = EMPTY if number % 2 == 0 else moved(EMPTY, at_random(EMPTY, random.Random(f"{seed} opens")))
        yield Match(board, "random", seed)


def _beginner(rng: random.Random) -> list[dict[str, Any]]:
    board = _position(rng, rng.choice(_DEPTHS))
    luck = rng.random()
    if luck < _P_SENSIBLE:
        answer = _sensible(board)
    elif luck < _P_SENSIBLE + _P_FIRST:
        answer = f"take {free_cells(board)[0]}"
    else:
        answer = "take 5"
    return [{"role": "user", "content": prompt(board)}, {"role": "assistant", "content": answer}]


def _sensible(board: str) -> str:
    """The answer of whoever looks one move ahead."""
    side = side_to_move(board)
    if wins := completing(board, side):
        return f"win {wins[0]}"
    if threats := completing(board, other(side)):
        return f"block {threats[0]}"
    return f"take {next(cell for cell in (5, 1, 3, 7, 9, 2, 4, 6, 8) if cell in free_cells(board))}"


def _position(rng: random.Random, depth: int) -> str:
    """A board after so many random moves, of which none ended the game."""
    while True:
        board = EMPTY
        for _ in range(depth):
            board = moved(board, at_random(board, rng))
            if is_over(board):
                break
        else:
            return board
