"""OpenAI Agents SDK: Responses and chat completions, whole and streamed, tools and a hand-over."""

import asyncio

from probe import URL, done

import agents
from agents import Agent, Runner
from openai import AsyncOpenAI

agents.set_trace_processors([])  # nothing leaves this machine


@agents.function_tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


async def ask() -> None:
    """Run them all."""
    async with AsyncOpenAI(api_key="sk-test", base_url=URL, max_retries=0) as client:
        agents.set_default_openai_client(client, use_for_tracing=False)
        await Runner.run(Agent(name="Guide", model="gpt-responses"), "hi")
        async for _ in Runner.run_streamed(Agent(name="Guide", model="gpt-responses-stream"), "hi").stream_events():
            pass
        await Runner.run(Agent(name="Painter", model="gpt-responses-tools", tools=[look]), "hi")
        chat = agents.OpenAIChatCompletionsModel("gpt-chat", client)
        await Runner.run(Agent(name="Chatty", model=chat), "hi")
        streamed = agents.OpenAIChatCompletionsModel("gpt-chat-stream", client)
        async for _ in Runner.run_streamed(Agent(name="Chatty", model=streamed), "hi").stream_events():
            pass
        tools = agents.OpenAIChatCompletionsModel("gpt-chat-tools", client)
        await Runner.run(Agent(name="Chatty", model=tools, tools=[look]), "hi")
        last = Agent(name="Last", model=agents.OpenAIChatCompletionsModel("gpt-handed-over", client))
        first = agents.OpenAIChatCompletionsModel("gpt-hands-over", client)
        await Runner.run(Agent(name="First", model=first, handoffs=[last]), "hi")


asyncio.run(ask())
done()
