"""Agno: agents and teams over chat completions and Responses."""

import asyncio
import os

os.environ["AGNO_TELEMETRY"] = "false"

from probe import done

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.team import Team
from openinference.instrumentation.agno import AgnoInstrumentor
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def agent(door: str, **options: object) -> Agent:
    """Make an agent of a door."""
    kind = OpenAIResponses if door.startswith("responses") else OpenAIChat
    return Agent(model=kind(id=f"gpt-{door}"), name="Painter", telemetry=False, **options)


async def streamed() -> None:
    """Read a stream."""
    async for _ in agent("async-stream", tools=[look]).arun("hi", stream=True):
        pass


trace.set_tracer_provider(TracerProvider())
AgnoInstrumentor().instrument()
agent("chat").run("hi", session_id="visit")
for _ in agent("stream").run("hi", stream=True):
    pass
agent("tools", tools=[look]).run("hi")
agent("schema", output_schema=Colour).run("hi")
agent("responses").run("hi")
agent("responses-tools", tools=[look]).run("hi")
for _ in agent("responses-stream").run("hi", stream=True):
    pass
asyncio.run(agent("async", tools=[look]).arun("hi"))
asyncio.run(streamed())
Team(members=[agent("member")], model=OpenAIChat(id="gpt-team"), telemetry=False).run("hi")
done()
