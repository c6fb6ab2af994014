"""An agent that answers whoever asks: the plain OpenAI SDK, a system prompt, a question, an answer.

`python agent.py "What does shipping to Norway cost?"` asks whatever `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL`
name; `SYSTEM_PROMPT` says what it is there for.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from openai import AsyncOpenAI


async def answer(client: AsyncOpenAI, model: str, system_prompt: str, question: str) -> list[Any]:
    """Answer a question, and return the conversation: messages, and the choice that answered."""
    conversation: list[Any] = [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": question},
    ]
    completion = await client.chat.completions.create(model=model, messages=conversation, max_tokens=256)
    return [*conversation, completion.choices[0]]


if __name__ == "__main__":
    prompt = os.environ.get("SYSTEM_PROMPT", "Answer customer questions about shipping politely and briefly.")
    *_, choice = asyncio.run(answer(AsyncOpenAI(), os.environ.get("MODEL", "gpt-4o-mini"), prompt, sys.argv[1]))
    print(choice.message.content)
