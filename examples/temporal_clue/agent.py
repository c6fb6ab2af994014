"""A detective: the plain OpenAI SDK, one puzzle, one answer whose last line names suspect, room, hour and weapon.

`python agent.py 7` draws the seventh full-size puzzle and asks whatever `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL`
name.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from typing import Any

from openai import AsyncOpenAI
from puzzles import FULL, Puzzle, make_puzzle


async def solve(client: AsyncOpenAI, model: str, puzzle: Puzzle) -> list[Any]:
    """Ask, and return the conversation: messages, and the choice that answered."""
    conversation: list[Any] = [{"role": "user", "content": puzzle.question}]
    limit = 2048 if puzzle.size.think else 32
    answer = await client.chat.completions.create(model=model, messages=conversation, max_tokens=limit)
    return [*conversation, answer.choices[0]]


def named(puzzle: Puzzle, answer: str) -> tuple[str | None, ...]:
    """What the last line of an answer names for each part; `None` where it names nothing, or several."""
    lines = [line for line in answer.casefold().splitlines() if line.strip()]
    words = set(re.findall(r"\w+", lines[-1])) if lines else set()
    found = ([value for value in values if value.casefold() in words] for values in puzzle.size.choices)
    return tuple(values[0] if len(values) == 1 else None for values in found)


def share_right(puzzle: Puzzle, answer: str) -> float:
    """Which share of the four parts an answer has right."""
    return sum(told == right for told, right in zip(named(puzzle, answer), puzzle.crime, strict=True)) / 4


if __name__ == "__main__":
    asked = make_puzzle(FULL, random.Random(sys.argv[1]))
    *_, choice = asyncio.run(solve(AsyncOpenAI(), os.environ.get("MODEL", "gpt-4o-mini"), asked))
    said = choice.message.content or ""
    print(asked.question, said, f"{share_right(asked, said):.0%} right; it was {', '.join(asked.crime)}", sep="\n\n")
