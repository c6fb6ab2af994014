"""CAMEL: its models, and the chat agent."""

import asyncio

from probe import URL, done

from camel.agents import ChatAgent
from camel.models import BaseModelBackend, ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter
from pydantic import BaseModel

HI = [{"role": "user", "content": "hi"}]


class Colour(BaseModel):
    """A colour."""

    name: str


class Words(BaseTokenCounter):
    """CAMEL's own counter asks the network for a tokenizer."""

    def count_tokens_from_messages(self, messages: list[object]) -> int:
        return len(str(messages).split())

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


def look(at: str) -> str:
    """Look at something.

    Args:
        at (str): What.
    """
    return f"the {at} is blue"


def model(name: str, **options: object) -> BaseModelBackend:
    """Make one, for any server that speaks OpenAI."""
    there = {"url": URL, "api_key": "sk-test", "model_config_dict": options, "token_counter": Words()}
    return ModelFactory.create(ModelPlatformType.OPENAI_COMPATIBLE_MODEL, name, **there)


async def run_async() -> None:
    """Everything that is async."""
    await model("gpt-async").arun(HI)
    await ChatAgent("Help.", model=model("gpt-agent-async"), tools=[FunctionTool(look)]).astep("hi")


model("gpt-chat").run(HI)
for _ in model("gpt-stream", stream=True).run(HI):
    pass
ChatAgent("Help.", model=model("gpt-agent"), tools=[FunctionTool(look)]).step("hi")
for _ in ChatAgent("Help.", model=model("gpt-agent-stream", stream=True), tools=[FunctionTool(look)]).step("hi"):
    pass
ChatAgent("Help.", model=model("gpt-structured")).step("hi", response_format=Colour)
asyncio.run(run_async())
done()
