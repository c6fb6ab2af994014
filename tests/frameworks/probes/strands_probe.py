"""Strands: agents over the OpenAI SDK, over LiteLLM, and over Responses where a release has it."""

import asyncio

from probe import URL, done

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel


class Colour(BaseModel):
    """A colour."""

    name: str


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def agent(door: str, kind: type = OpenAIModel, prefix: str = "", **more: object) -> Agent:
    """Make an agent of a door; without what prints its answers."""
    return Agent(model=kind(model_id=f"{prefix}gpt-{door}", **more), tools=[look], callback_handler=None)


async def streamed() -> None:
    """Read a stream."""
    async for _ in agent("stream").stream_async("hi"):
        pass


trace.set_tracer_provider(TracerProvider())
agent("agent")("hi")
asyncio.run(agent("async").invoke_async("hi"))
asyncio.run(streamed())
agent("schema").structured_output(Colour, "hi")
try:
    from strands.models.litellm import LiteLLMModel
    from strands.models.openai_responses import OpenAIResponsesModel
except ImportError:
    pass
else:
    agent("responses", OpenAIResponsesModel)("hi")
    agent("litellm", LiteLLMModel, "openai/", client_args={"api_base": URL, "api_key": "sk-test"})("hi")
done()
