"""AutoGen: its model client, agents and teams."""

import asyncio

from probe import URL, done

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import UserMessage
from autogen_ext.agents.openai import OpenAIAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from openai import AsyncOpenAI
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel

trace.set_tracer_provider(TracerProvider())
HI = [UserMessage(content="hi", source="user")]
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


class Colour(BaseModel):
    """A colour."""

    name: str


async def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def client(model: str) -> OpenAIChatCompletionClient:
    """Make one."""
    return OpenAIChatCompletionClient(model=model, base_url=URL, api_key="sk-test", model_info=INFO)


async def main() -> None:
    """Everything is async."""
    await client("gpt-chat").create(HI)
    async for _ in client("gpt-stream").create_stream(HI):
        pass
    await client("gpt-structured").create(HI, json_output=Colour)
    agent = AssistantAgent("painter", client("gpt-agent"), tools=[look], reflect_on_tool_use=True)
    await agent.run(task="hi")
    streaming = AssistantAgent(
        "painter", client("gpt-agent-stream"), tools=[look], reflect_on_tool_use=True, model_client_stream=True
    )
    async for _ in streaming.run_stream(task="hi"):
        pass
    await AssistantAgent("painter", client("gpt-output"), output_content_type=Colour).run(task="hi")
    team = [AssistantAgent(name, client("gpt-team")) for name in ("painter", "critic")]
    await RoundRobinGroupChat(team, termination_condition=MaxMessageTermination(3)).run(task="hi")
    sdk = AsyncOpenAI(base_url=URL, api_key="sk-test")
    await OpenAIAgent("painter", "Paints.", sdk, "gpt-responses", "Paint.").run(task="hi")


asyncio.run(main())
done()
