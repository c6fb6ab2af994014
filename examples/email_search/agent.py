"""An agent that answers questions about an inbox: the plain OpenAI SDK and two tools, search and read.

`python agent.py inbox.db "On which day does Zoe want to meet about the garden?"` asks whatever `OPENAI_BASE_URL`,
`OPENAI_API_KEY` and `MODEL` name.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from inbox import Inbox, label, number_of

MAX_TURNS = 6
"""Answers of the model to one question, tool calls included; after these it has given up."""

INSTRUCTIONS = (
    "You answer questions about the user's inbox. Search it, read the mail that tells, and answer with the fact alone. "
    'If the inbox does not tell, answer "I don\'t know".'
)


def _tool(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("search_emails", "Finds the newest mails that have all of some words.", "query", "The words."),
    _tool("read_email", "Shows a mail.", "id", "Its id, as a search shows it."),
]


async def answer(client: AsyncOpenAI, model: str, inbox: Inbox, question: str) -> list[Any]:
    """Let a model search and read until it answers; return the conversation: messages, and choices of the model."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    conversation = list(messages)
    for _ in range(MAX_TURNS):
        completion = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=256)
        choice = completion.choices[0]
        conversation.append(choice)
        if not choice.message.tool_calls:
            break
        calls = [call.model_dump(include={"id", "type", "function"}) for call in choice.message.tool_calls]
        messages.append({"role": "assistant", "content": choice.message.content, "tool_calls": calls})
        for call in choice.message.tool_calls:
            result = use(inbox, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            conversation.append(messages[-1])
    return conversation


def use(inbox: Inbox, tool: str, arguments: str) -> str:
    """What a tool says; to a bad call, what was bad about it."""
    if tool == "search_emails" and (query := _argument(arguments, "query")) is not None:
        hits = inbox.search(query)
        return "\n".join(f"{label(n)} {mail.sender}: {mail.subject}" for n, mail in hits) or "No mail has these words."
    if tool == "read_email" and (id := _argument(arguments, "id")) is not None:
        number = number_of(id)
        mail = None if number is None else inbox.read(number)
        return f"{mail.sent}, {mail.sender}: {mail.subject}\n{mail.body}" if mail else f"There is no mail {id}."
    return 'Bad call. Call search_emails with {"query": WORDS}, or read_email with {"id": ID}.'


def read_in(conversation: list[Any]) -> set[int]:
    """The numbers of the mails that a conversation asked to read."""
    answers = [said.message for said in conversation if hasattr(said, "message")]
    calls = [call for message in answers for call in message.tool_calls or ()]
    ids = [_argument(call.function.arguments, "id") for call in calls if call.function.name == "read_email"]
    return {number for id in ids if id is not None and (number := number_of(id)) is not None}


def final_answer(conversation: list[Any]) -> str:
    """What the model said in the end; nothing if it was still at work."""
    message = getattr(conversation[-1], "message", None)
    return "" if message is None or message.tool_calls else (message.content or "").strip()


def _argument(arguments: str, name: str) -> str | None:
    try:
        given = json.loads(arguments)
    except ValueError:
        return None
    value = given.get(name) if isinstance(given, dict) else None
    return str(value) if isinstance(value, str | int) else None


if __name__ == "__main__":
    _, file, asked = sys.argv
    said = asyncio.run(answer(AsyncOpenAI(), os.environ.get("MODEL", "gpt-4o-mini"), Inbox.existing(Path(file)), asked))
    print(final_answer(said) or f"no answer in {MAX_TURNS} turns")
