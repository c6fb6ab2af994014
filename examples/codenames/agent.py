"""Two teammates at Codenames: the plain OpenAI SDK, one model in both roles, one prompt and one answer a move.

`python agent.py 7` draws a full-size board and lets whatever `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL` name play
it.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from typing import Any

from game import FULL, Board, guess, guesser_prompt, make_board, read_clue, read_guesses, spymaster_prompt
from openai import AsyncOpenAI


async def play(client: AsyncOpenAI, model: str, board: Board) -> tuple[Board, list[list[Any]]]:
    """Play until it is over; the board, and a conversation for each move: message, and the choice that answered it.

    The guesser's prompt holds the words and the clue and nothing else: one model plays both, but does not know it.
    """
    moves: list[list[Any]] = []

    async def ask(prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        answer = await client.chat.completions.create(model=model, messages=[message], max_tokens=32)
        moves.append([message, answer.choices[0]])
        return answer.choices[0].message.content or ""

    for _ in range(board.size.turns):
        clue = read_clue(board, await ask(spymaster_prompt(board)))
        if clue is not None:
            said = await ask(guesser_prompt(board, *clue))
            board = guess(board, read_guesses(board, said, clue[1]))
        if board.is_over:
            break
    return board, moves


if __name__ == "__main__":
    drawn = make_board(FULL, random.Random(sys.argv[1]))
    end, played = asyncio.run(play(AsyncOpenAI(), os.environ.get("MODEL", "gpt-4o-mini"), drawn))
    for asked, answered in played:
        print(asked["content"], answered.message.content, sep="\n-> ", end="\n\n")
    print(f"found {len(end.team & end.open)} of {len(end.team)}{', and the assassin' if end.killed else ''}")
