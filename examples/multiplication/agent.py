"""An agent that multiplies: the plain OpenAI SDK, one question, one answer, worked out in the open.

`python agent.py 23 4` asks whatever `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL` name.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from openai import AsyncOpenAI


@dataclass(frozen=True)
class Problem:
    """Two factors."""

    asked: ClassVar[str] = "What is {}? Work it out, end with the number."

    a: int
    b: int

    @property
    def question(self) -> str:
        """What the agent is asked."""
        return self.asked.format(f"{self.a} x {self.b}")


async def solve(client: AsyncOpenAI, model: str, problem: Problem) -> list[Any]:
    """Ask, and return the conversation: messages, and the choice that answered."""
    conversation: list[Any] = [{"role": "user", "content": problem.question}]
    answer = await client.chat.completions.create(model=model, messages=conversation, max_tokens=64)
    return [*conversation, answer.choices[0]]


def is_right(problem: Problem, answer: str) -> bool:
    """Whether the last number of an answer is the product."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == problem.a * problem.b


if __name__ == "__main__":
    asked = Problem(int(sys.argv[1]), int(sys.argv[2]))
    *_, choice = asyncio.run(solve(AsyncOpenAI(), os.environ.get("MODEL", "gpt-4o-mini"), asked))
    print(choice.message.content, "right" if is_right(asked, choice.message.content or "") else "wrong")
