"""Pydantic AI, observed by OpenTelemetry: chat and Responses, whole and streamed, tools and typed output."""

import asyncio

from probe import URL, done

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

trace.set_tracer_provider(TracerProvider())
Agent.instrument_all()
provider = OpenAIProvider(base_url=URL, api_key="sk-test")
of_another_loop = OpenAIProvider(base_url=URL, api_key="sk-test")


class Colour(BaseModel):
    """What is asked for."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def chat(door: str) -> OpenAIChatModel:
    """A model of one door."""
    return OpenAIChatModel(f"gpt-{door}", provider=provider)


async def ask() -> None:
    """With a loop."""
    await Agent(chat("chat"), name="Guide").run("hi")
    async with Agent(chat("stream"), name="Guide").run_stream("hi") as result:
        await result.get_output()
    await Agent(chat("tools"), name="Painter", tools=[look]).run("hi")
    await Agent(chat("typed"), name="Painter", output_type=Colour).run("hi")
    await Agent(OpenAIResponsesModel("gpt-responses", provider=provider), name="Guide").run("hi")


asyncio.run(ask())
Agent(OpenAIChatModel("gpt-sync", provider=of_another_loop), name="Guide").run_sync("hi")
done()
