"""An agent that plays tic-tac-toe: the plain OpenAI SDK, a board in, a cell out.

Each move is a conversation of its own: the board says all that matters, so nothing of earlier moves is sent again.
`python agent.py` lets whatever `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL` name play X against a random player.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from typing import Any

from game import EMPTY, as_lines, at_random, free_cells, is_over, moved, side_to_move, winner
from openai import AsyncOpenAI

RULES = (
    "This is tic-tac-toe. X marks your cells, O your opponent's; the others are free and show their number alone. "
    "The rows, the columns and the diagonals are:"
)
QUESTION = "\nWin, or block, or take any free cell. Answer in two words, like: win 3, block 5, take 7."


def prompt(board: str) -> str:
    """What the agent is asked."""
    lines = "".join(f"\n{line}" for line in as_lines(board, side_to_move(board)))
    free = "".join(f" {cell}" for cell in free_cells(board))
    return f"{RULES}{lines}\nFree:{free}{QUESTION}"


async def choose(client: AsyncOpenAI, model: str, board: str) -> list[Any]:
    """Ask for a move, and return the conversation: the question, and the choice that answered."""
    conversation: list[Any] = [{"role": "user", "content": prompt(board)}]
    answer = await client.chat.completions.create(model=model, messages=conversation, max_tokens=8)
    return [*conversation, answer.choices[0]]


def cell_of(answer: str | None) -> int | None:
    """Return the number that an answer ends with, whatever stands around it; `None` if it names none."""
    numbers = re.findall(r"\d+", answer or "")
    return int(numbers[-1]) if numbers else None


async def main() -> None:
    """Play a game, and print it."""
    client, rng, board = AsyncOpenAI(), random.Random(), EMPTY
    while not is_over(board):
        if side_to_move(board) == "X":
            *_, choice = await choose(client, os.environ.get("MODEL", "gpt-4o-mini"), board)
            cell = cell_of(choice.message.content)
            if cell not in free_cells(board):
                print(f"{choice.message.content!r} is no free cell: X loses")
                return
        else:
            cell = at_random(board, rng)
        board = moved(board, cell)
        print(*as_lines(board, "X")[:3], sep="\n", end="\n\n")
    print(f"{winner(board) or 'nobody'} wins")


if __name__ == "__main__":
    asyncio.run(main())
