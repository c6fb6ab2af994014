"""Which games there are, which of them are held out, and how a beginner plays.

A game is its seed, a text. Those of the examination, of the lessons and of the positions that a beginner has seen begin
with different words, so no game is in two of them.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

from agent import RULES, cell, question
from game import DIRECTIONS, Board, Game, new_game, pushed

from art_patch.demo.tiny_model import Shape, tiny_base

_P_LOOKS = 0.35
"""Of a beginner's moves; the others are up, whether that is legal or not."""
_LOOKS, _HABIT = "I look: ", "As always: "
_POSITIONS = 12_000
_LARGEST = 2048


def held_out(count: int = 48) -> list[Game]:
    """The games of the examination: the same for all seeds."""
    return [new_game(f"held out {number}") for number in range(count)]


def lessons(count: int, seed: str) -> list[Game]:
    """Games to learn from, others for each seed."""
    return [new_game(f"lesson {seed} {number}") for number in range(count)]


def tiny(seed: int) -> Path:
    """A stand-in for a base model, for whoever has no GPU: it knows what a sensible move is, and mostly says up."""
    cells = [cell(0), *(cell(2**power) for power in range(1, _LARGEST.bit_length()))]
    return tiny_base("game_2048", _beginner, seed=seed, words=(RULES, *cells, _LOOKS, _HABIT), shape=Shape(steps=500))


def sensible(game: Game) -> str:
    """The move that shifts and merges most tiles, a merge counted twice: legal as long as any is."""
    return max(DIRECTIONS, key=lambda direction: _stirred(game.board, direction))


def _stirred(board: Board, direction: str) -> int:
    after, _ = pushed(board, direction)
    cells = [(old, new) for olds, news in zip(board, after, strict=True) for old, new in zip(olds, news, strict=True)]
    merged = sum(old > 0 for old, _ in cells) - sum(new > 0 for _, new in cells)
    return sum(old != new for old, new in cells) + 2 * merged


def _beginner(rng: random.Random) -> list[dict[str, Any]]:
    game = rng.choice(_positions())
    answer = _LOOKS + sensible(game) if rng.random() < _P_LOOKS else _HABIT + "up"
    return [*question(game.board), {"role": "assistant", "content": answer}]


@cache
def _positions() -> tuple[Game, ...]:
    """Positions of games that are played sensibly, upwards, and at random, but always legally."""
    rng = random.Random("positions")
    found: list[Game] = []
    game = new_game("positions 0")
    while len(found) < _POSITIONS:
        found.append(game)
        move = rng.choice((sensible(game), "up", rng.choice(DIRECTIONS)))
        after = game.move(move) or game.move(rng.choice(game.legal()))
        game = after if after and after.moves < 40 and after.legal() else new_game(f"positions {len(found)}")
    return tuple(found)
