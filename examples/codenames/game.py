"""Codenames for one team: boards, clues, guesses, and what they are worth. Pure.

- A board is words in a row; some are the team's, one is the assassin, the others are bystanders. The spymaster knows
  which is which and says one word and a number; the guesser knows the words alone and names some of them.
- The team's own words count; the first word that is not the team's ends the turn; the assassin ends the game.
- A clue that is no word and a number, or that stands on the board, ends the turn with nothing found.
- The reward is the share of the team's words that were found, less 1 for the assassin.
- One board in five is held out, by a hash of its words that no seed moves.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": ("cat", "horse", "shark", "eagle", "spider", "wolf"),
    "fruit": ("apple", "banana", "cherry", "lemon", "grape", "peach"),
    "tool": ("hammer", "saw", "drill", "wrench", "shovel", "axe"),
    "colour": ("red", "green", "blue", "yellow", "purple", "black"),
    "music": ("piano", "violin", "drum", "flute", "guitar", "trumpet"),
    "body": ("hand", "knee", "nose", "heart", "elbow", "ear"),
    "weather": ("rain", "snow", "storm", "fog", "thunder", "hail"),
    "vehicle": ("car", "train", "boat", "rocket", "tractor", "bicycle"),
}
CATEGORY = {word: name for name, words in CATEGORIES.items() for word in words}
_P_RIGHT = 0.35
"""Of what a beginner says, in either role."""


@dataclass(frozen=True)
class Size:
    """Words on a board, the team's at least and at most, turns; and the words to draw from.

    With `one_category` the team's words share a category, and no other word on the board is of it.
    """

    words: int
    team: tuple[int, int]
    turns: int
    one_category: bool
    categories: int
    words_each: int

    @property
    def vocabulary(self) -> dict[str, tuple[str, ...]]:
        """The words to draw from, by category."""
        return {name: CATEGORIES[name][: self.words_each] for name in list(CATEGORIES)[: self.categories]}


SMALL = Size(words=6, team=(2, 3), turns=1, one_category=True, categories=5, words_each=4)
"""For a tiny model: the category is the clue, and one turn finds all."""
FULL = Size(words=25, team=(9, 9), turns=6, one_category=False, categories=8, words_each=6)
"""For a real one: any nine words of 48 are the team's."""


@dataclass(frozen=True)
class Board:
    """Words as they lie, whose they are, and what was found so far."""

    size: Size
    words: tuple[str, ...]
    team: frozenset[str]
    assassin: str
    open: frozenset[str] = frozenset()
    killed: bool = False

    @property
    def left(self) -> list[str]:
        """The team's words that are not found yet."""
        return [word for word in self.words if word in self.team - self.open]

    @property
    def closed(self) -> list[str]:
        """All words that are not found yet."""
        return [word for word in self.words if word not in self.open]

    @property
    def is_over(self) -> bool:
        """Whether all are found, or one too many."""
        return self.killed or not self.left

    @property
    def reward(self) -> float:
        """What it came to."""
        return len(self.team & self.open) / len(self.team) - self.killed


def spymaster_prompt(board: Board) -> str:
    """What the spymaster is asked."""
    others = [word for word in board.closed if word not in board.team and word != board.assassin]
    lies = f"Yours: {', '.join(board.left)}. Others: {', '.join(others)}. Assassin: {board.assassin}."
    if board.size.one_category:
        return f"{lies} Your clue, a word and a number?"
    return (
        f"You are the spymaster in Codenames. {lies} Give a clue for as many of your words as you dare: one word that "
        "is not on the board, and how many of your words it fits, such as `ocean 2`. Answer with the clue alone."
    )


def guesser_prompt(board: Board, clue: str, number: int) -> str:
    """What the guesser is asked."""
    lies = f"Words: {', '.join(board.closed)}. Clue: {clue} {number}."
    if board.size.one_category:
        return f"{lies} Which words?"
    return (
        f"You are the guesser in Codenames. {lies} Name the words that are meant, the surest first. One of the others "
        "is the assassin, who ends the game. Answer with the words alone."
    )


def read_clue(board: Board, said: str) -> tuple[str, int] | None:
    """The last word and number of what a spymaster said; `None` if it is no legal clue."""
    found = re.findall(r"([a-z]+)\W+(\d+)", said.casefold())
    if not found or found[-1][0] in board.words or int(found[-1][1]) == 0:
        return None
    return found[-1][0], int(found[-1][1])


def read_guesses(board: Board, said: str, number: int) -> list[str]:
    """The words of the board that a guesser named, in that order, no more than the clue's number."""
    named = (word for word in re.findall(r"[a-z]+", said.casefold()) if word in board.closed)
    return list(dict.fromkeys(named))[:number]


def guess(board: Board, guesses: Sequence[str]) -> Board:
    """The board after these guesses."""
    for word in guesses:
        board = replace(board, open=board.open | {word}, killed=word == board.assassin)
        if word not in board.team:
            break
    return board


def make_board(size: Size, rng: random.Random) -> Board:
    """Draw a board."""
    count = rng.randint(*size.team)
    everything = [word for words in size.vocabulary.values() for word in words]
    own = rng.choice(list(size.vocabulary)) if size.one_category else None
    team = rng.sample(size.vocabulary[own] if own else everything, count)
    rest = rng.sample([word for word in everything if word not in team and CATEGORY[word] != own], size.words - count)
    words = rng.sample([*team, *rest], size.words)
    return Board(size, tuple(words), frozenset(team), assassin=rest[0])


def held_out(size: Size, count: int = 60) -> list[Board]:
    """The boards of the examination."""
    return list(islice(_boards(size, random.Random("held out"), of_held_out=True), count))


def lessons(size: Size, count: int, seed: str) -> list[Board]:
    """Boards to learn from, drawn anew for each seed."""
    return list(islice(_boards(size, random.Random(seed), of_held_out=False), count))


def beginner(rng: random.Random) -> list[dict[str, Any]]:
    """One of the two roles as the tiny stand-in has seen it played: it knows the words, and mostly plays badly.

    A bad spymaster's clue fits the first of the other words, a bad guesser names the first words that lie there.
    """
    (board,) = lessons(SMALL, 1, seed=str(rng.random()))
    is_good = rng.random() < _P_RIGHT
    own, number = CATEGORY[board.left[0]], len(board.left)
    if rng.random() < 0.5:
        other = next(word for word in board.words if word not in board.team and word != board.assassin)
        return _turn(spymaster_prompt(board), f"{own} {number}" if is_good else f"{CATEGORY[other]} 1")
    meant = board.left if is_good else board.words[:number]
    return _turn(guesser_prompt(board, own, number), ", ".join(meant))


def _turn(asked: str, said: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _boards(size: Size, rng: random.Random, *, of_held_out: bool) -> Iterator[Board]:
    while True:
        board = make_board(size, rng)
        if _is_held_out(board) == of_held_out:
            yield board


def _is_held_out(board: Board) -> bool:
    told = " ".join([*sorted(board.words), board.assassin])
    return hashlib.sha256(told.encode()).digest()[0] % 5 == 0
