"""An agent that plays 2048: the plain OpenAI SDK, one short question for each move, which shows the board and no more.

What happened before does not matter in 2048, so each move is a conversation of its own and a game stays cheap however
long it is. An answer that names no direction, or one that changes nothing, ends the game.

`python agent.py` plays a game with whatever `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL` name.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import Any

from game import DIRECTIONS, Board, Game, new_game
from openai import AsyncOpenAI

RULES = (
    "You play 2048: a move pushes all tiles to one side, and equal neighbours merge. A move that changes nothing loses "
    "the game. You see the board, a dot is an empty cell. End your answer with left, right, up or down."
)


@dataclass(frozen=True)
class Played:
    """A game that ended.

    Attributes:
        game: its last state.
        conversations: one for each move, messages and the choice that answered; the last may be illegal.
        illegal: it ended because the last answer named no direction, or one that changes nothing.
    """

    game: Game
    conversations: list[list[Any]]
    illegal: bool


async def play(client: AsyncOpenAI, model: str, game: Game, limit: int) -> Played:
    """Play until no move is possible, an answer is illegal, or `limit` moves are made."""
    conversations: list[list[Any]] = []
    while game.moves < limit and game.legal():
        messages: Any = question(game.board)
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=64)
        conversations.append([*messages, answer.choices[0]])
        direction = read(answer.choices[0].message.content or "")
        after = direction and game.move(direction)
        if not after:
            return Played(game, conversations, illegal=True)
        game = after
    return Played(game, conversations, illegal=False)


def question(board: Board) -> list[dict[str, Any]]:
    """What is asked about a board."""
    return [{"role": "user", "content": f"{RULES}\n{drawn(board)}"}]


def drawn(board: Board) -> str:
    """A board as text: a line for each row, columns five wide."""
    return "\n".join("".join(cell(tile) for tile in row) for row in board)


def cell(tile: int) -> str:
    """A tile as it is drawn."""
    return f" {tile or '.':>4}"


def read(answer: str) -> str | None:
    """The last direction that an answer names; `None` if it names none."""
    named = re.findall("|".join(DIRECTIONS), answer.lower())
    return named[-1] if named else None


async def _show(limit: int) -> None:
    played = await play(AsyncOpenAI(), os.environ.get("MODEL", "gpt-4o-mini"), new_game("a game to look at"), limit)
    print(drawn(played.game.board))
    print(f"score {played.game.score} after {played.game.moves} moves{', then an illegal one' * played.illegal}")


if __name__ == "__main__":
    asyncio.run(_show(limit=100))
