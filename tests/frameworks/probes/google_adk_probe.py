"""Google ADK: agents over LiteLLM, which is its door to OpenAI."""

import asyncio
import os

os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "SPAN_ONLY"

from probe import URL, done

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def agent(door: str, provider: str = "openai", name: str = "painter", **options: object) -> LlmAgent:
    """Make an agent of a door."""
    model = LiteLlm(model=f"{provider}/gpt-{door}", api_base=URL, api_key="sk-test")
    return LlmAgent(name=name, model=model, **options)


async def run(root: object, **options: object) -> None:
    """Run an agent in a session."""
    runner = InMemoryRunner(agent=root, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    said = types.Content(role="user", parts=[types.Part(text="hi")])
    async for _ in runner.run_async(user_id="u", session_id=session.id, new_message=said, **options):
        pass


async def main() -> None:
    """Use each door."""
    await run(agent("chat"))
    await run(agent("tools", tools=[look]))
    await run(agent("stream", tools=[look]), run_config=RunConfig(streaming_mode=StreamingMode.SSE))
    await run(agent("schema", output_schema=Colour))
    await run(agent("vllm", "hosted_vllm"))
    await run(SequentialAgent(name="both", sub_agents=[agent("first", name="a"), agent("second", name="b")]))


trace.set_tracer_provider(TracerProvider())
asyncio.run(main())
done()
