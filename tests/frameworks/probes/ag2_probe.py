"""AG2: agents of release 1, over chat completions and Responses; before it, those of what is AG2 Classic today."""

import asyncio
from importlib.util import find_spec

from probe import URL, done

from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


async def run_agents() -> None:
    """Agents of release 1."""
    from ag2 import Agent
    from ag2.config import OpenAIConfig, OpenAIResponsesConfig

    there = {"base_url": URL, "api_key": "sk-test"}
    await Agent("painter", config=OpenAIConfig("gpt-agent", **there), tools=[look]).ask("hi")
    streaming = OpenAIConfig("gpt-agent-stream", streaming=True, **there)
    reply = await Agent("painter", config=streaming, tools=[look]).ask("hi")
    await reply.ask("And now?")
    await Agent("painter", config=OpenAIConfig("gpt-structured", **there), response_schema=Colour).ask("hi")
    await Agent("painter", config=OpenAIResponsesConfig("gpt-responses", **there), tools=[look]).ask("hi")
    streaming = OpenAIResponsesConfig("gpt-responses-stream", streaming=True, **there)
    await Agent("painter", config=streaming, tools=[look]).ask("hi")


def run_classic() -> None:
    """Agents that talk to one another; streamed, they would ask the network for a tokenizer."""
    from autogen import ConversableAgent, LLMConfig

    def agent(name: str, model: str, **options: object) -> ConversableAgent:
        config = LLMConfig({"model": model, "base_url": URL, "api_key": "sk-test", **options})
        return ConversableAgent(name, llm_config=config, human_input_mode="NEVER")

    user = ConversableAgent("user", llm_config=False, human_input_mode="NEVER")
    user.register_for_execution()(look)
    painter = agent("painter", "gpt-agent")
    painter.register_for_llm(description="Look.")(look)
    user.initiate_chat(painter, message="hi", max_turns=2)
    user.initiate_chat(agent("painter", "gpt-structured", response_format=Colour), message="hi", max_turns=1)
    user.initiate_chat(agent("painter", "gpt-responses", api_type="responses"), message="hi", max_turns=1)
    asyncio.run(user.a_initiate_chat(agent("painter", "gpt-async"), message="hi", max_turns=1))


if find_spec("ag2"):
    asyncio.run(run_agents())
else:
    run_classic()
done()
