"""Haystack: generators alone, in a pipeline and in an agent."""

import asyncio
import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from probe import done

from haystack import Pipeline
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool

HI = [ChatMessage.from_user("hi")]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def read(chunk: object) -> None:
    """Take a part of a stream."""


async def read_async(chunk: object) -> None:
    """Take a part of a stream."""


TOOL = Tool(name="look", description="Look at something.", parameters=SCHEMA, function=look)

OpenAIChatGenerator(model="gpt-chat").run(HI)
OpenAIChatGenerator(model="gpt-stream", streaming_callback=read).run(HI)
asyncio.run(OpenAIChatGenerator(model="gpt-async").run_async(HI))
asyncio.run(OpenAIChatGenerator(model="gpt-async-stream", streaming_callback=read_async).run_async(HI))
pipeline = Pipeline()
pipeline.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("Say {{what}}.")]))
pipeline.add_component("llm", OpenAIChatGenerator(model="gpt-pipeline"))
pipeline.connect("prompt.prompt", "llm.messages")
pipeline.run({"prompt": {"what": "hi"}})
agent = Agent(chat_generator=OpenAIChatGenerator(model="gpt-agent"), tools=[TOOL])
agent.warm_up()
agent.run(messages=HI)
again = Agent(chat_generator=OpenAIChatGenerator(model="gpt-agent-async"), tools=[TOOL])
again.warm_up()
asyncio.run(again.run_async(messages=HI))
try:
    from haystack.components.generators.chat import OpenAIResponsesChatGenerator
except ImportError:
    pass
else:
    OpenAIResponsesChatGenerator(model="gpt-responses").run(HI)
done()
