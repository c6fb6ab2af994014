"""Questions about an inbox, written by a model: `python make_questions.py inbox.db --count 100 --out questions.jsonl`.

It shows the model that `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `MODEL` name a mail at a time, and asks for a question
that this mail answers, and the answer. What is no such thing is left out. Read them before you train on them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
from pathlib import Path

from openai import AsyncOpenAI

import questions
from inbox import Inbox
from questions import Question

_AT_ONCE = 8
_LONGEST_ANSWER = 6
_PROMPT = """\
Here is a mail from somebody's inbox.

Date: {mail.sent}
From: {mail.sender}
Subject: {mail.subject}

{mail.body}

Write a question that its owner may ask months later, that this mail alone answers, with a short exact answer (a name, a
date, a number) that stands in the mail word by word. Name people and things, do not speak of "this mail".
Answer with JSON: {{"question": "...", "answer": "..."}}"""


async def make(client: AsyncOpenAI, model: str, inbox: Inbox, count: int, seed: int) -> list[Question]:
    """Ask for a question about each of `count` mails; return those that are of use."""
    numbers = random.Random(seed).sample(range(1, len(inbox) + 1), min(count, len(inbox)))
    few = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> Question | None:
        mail = inbox.read(number)
        async with few:
            completion = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": _PROMPT.format(mail=mail)}], max_tokens=200
            )
        return _read(completion.choices[0].message.content or "", number, mail.body if mail else "")

    made = await asyncio.gather(*map(one, numbers))
    return [question for question in made if question]


def _read(said: str, number: int, body: str) -> Question | None:
    """The question in an answer, if its answer is short and stands in the mail."""
    found = re.search(r"\{.*\}", said, re.DOTALL)
    try:
        given = json.loads(found[0]) if found else {}
    except ValueError:
        return None
    text, answer = given.get("question"), given.get("answer")
    if not (isinstance(text, str) and isinstance(answer, str)) or len(answer.split()) > _LONGEST_ANSWER:
        return None
    question = Question(text, answer, number)
    return question if answer.strip() and question.is_right(body) else None


def main() -> None:
    """Read the options, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inbox", type=Path)
    parser.add_argument("--count", type=int, default=100, help="mails to ask about (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which mails (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("questions.jsonl"), help="(%(default)s)")
    asked = parser.parse_args()
    model = os.environ.get("MODEL", "gpt-4o-mini")
    made = asyncio.run(make(AsyncOpenAI(), model, Inbox.existing(asked.inbox), asked.count, asked.seed))
    questions.write(made, asked.out)
    print(f"{len(made)} questions in {asked.out}")


if __name__ == "__main__":
    main()
