"""LlamaIndex: its LLM classes, agents, and a query engine over a retriever."""

import asyncio

from probe import URL, done

from llama_index.core import Document, SummaryIndex
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI, OpenAIResponses
from llama_index.llms.openai import utils
from pydantic import BaseModel

HI = [ChatMessage(role="user", content="hi")]


class Colour(BaseModel):
    """A colour."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def llm(model: str, kind: type = OpenAI, **options: object) -> OpenAI:
    """Make one; the class wants to know how long a prompt of its model may be."""
    utils.ALL_AVAILABLE_MODELS[model] = utils.CHAT_MODELS[model] = 8192
    return kind(model=model, api_base=URL, api_key="sk-test", **options)


async def run_agents() -> None:
    """Everything that is async."""
    await llm("gpt-async").achat(HI)
    async for _ in await llm("gpt-async-stream").astream_chat(HI):
        pass
    await FunctionAgent(tools=[look], llm=llm("gpt-agent")).run("hi")
    await FunctionAgent(tools=[look], llm=llm("gpt-agent-whole"), streaming=False).run("hi")
    await FunctionAgent(tools=[look], llm=llm("gpt-agent-responses", OpenAIResponses)).run("hi")
    await ReActAgent(tools=[look], llm=llm("gpt-react")).run("hi")


llm("gpt-chat").chat(HI)
for _ in llm("gpt-stream").stream_chat(HI):
    pass
llm("gpt-complete").complete("hi")
llm("gpt-tools").predict_and_call([FunctionTool.from_defaults(look)], "hi")
llm("gpt-structured").as_structured_llm(Colour).chat(HI)
llm("gpt-responses", OpenAIResponses).chat(HI)
for _ in llm("gpt-responses-stream", OpenAIResponses).stream_chat(HI):
    pass
SummaryIndex.from_documents([Document(text="The sky is blue.")]).as_query_engine(llm=llm("gpt-query")).query("Colour?")
asyncio.run(run_agents())
done()
