"""Microsoft Agent Framework: agents over chat completions and Responses, and a workflow of them."""

import asyncio
import os

os.environ |= {"ENABLE_INSTRUMENTATION": "true", "ENABLE_SENSITIVE_DATA": "true"}

from probe import done

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from agent_framework import Agent, WorkflowBuilder
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def agent(door: str, kind: type = OpenAIChatCompletionClient, name: str = "Painter", **options: object) -> Agent:
    """Make an agent of a door."""
    return Agent(kind(model=f"gpt-{door}"), name=name, **options)


async def main() -> None:
    """Use each door."""
    await agent("chat").run("hi")
    await agent("tools", tools=[look]).run("hi")
    async for _ in agent("stream", tools=[look]).run("hi", stream=True):
        pass
    await agent("schema").run("hi", options={"response_format": Colour})
    await agent("responses", OpenAIChatClient, tools=[look]).run("hi")
    async for _ in agent("responses-stream", OpenAIChatClient).run("hi", stream=True):
        pass
    first, second = agent("first", name="A"), agent("second", name="B")
    await WorkflowBuilder(name="both", start_executor=first).add_edge(first, second).build().run("hi")


trace.set_tracer_provider(TracerProvider())
asyncio.run(main())
done()
