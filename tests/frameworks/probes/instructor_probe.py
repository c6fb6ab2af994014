"""Instructor: a client that it has patched, in each of its ways to ask for a structure."""

import asyncio
from collections.abc import Iterable

from probe import done

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_retries": 0}


async def doors() -> None:
    """Those that are awaited."""
    client = instructor.from_openai(AsyncOpenAI())
    await client.chat.completions.create(model="gpt-async", response_model=Colour, **ASKED)
    async for _ in client.chat.completions.create_partial(model="gpt-async-partial", response_model=Colour, **ASKED):
        pass


client = instructor.from_openai(OpenAI())
client.chat.completions.create(model="gpt-tools", response_model=Colour, **ASKED)
client.chat.completions.create_with_completion(model="gpt-completion", response_model=Colour, **ASKED)
for _ in client.chat.completions.create_partial(model="gpt-partial", response_model=Colour, **ASKED):
    pass
client.chat.completions.create(model="gpt-iterable", response_model=Iterable[Colour], **ASKED)
client.chat.completions.create(model="gpt-plain", response_model=None, messages=ASKED["messages"])
structured = instructor.from_openai(OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
structured.chat.completions.create(model="gpt-schema", response_model=Colour, **ASKED)
responses = instructor.from_openai(OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
responses.chat.completions.create(model="gpt-responses", response_model=Colour, **ASKED)
instructor.from_provider("openai/gpt-provider").chat.completions.create(response_model=Colour, **ASKED)
asyncio.run(doors())
done()
