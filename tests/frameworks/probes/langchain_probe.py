"""LangChain: `ChatOpenAI` in every way, and an agent made by hand."""

import asyncio

from probe import done

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Colour(BaseModel):
    """What is asked for."""

    name: str


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def model(door: str, **options: object) -> ChatOpenAI:
    """A model of one door."""
    return ChatOpenAI(model=f"gpt-{door}", max_retries=0, **options)


async def ask() -> None:
    """With a loop."""
    await model("async").ainvoke("hi")
    async for _ in model("async-stream").astream("hi"):
        pass


model("chat").invoke("hi")
for _ in model("stream").stream("hi"):
    pass
model("batch").batch(["hi", "ho"])
model("structured").with_structured_output(Colour, method="json_schema").invoke("hi")
model("responses", use_responses_api=True).invoke("hi")
(ChatPromptTemplate.from_messages([("user", "{text}")]) | model("chain")).invoke({"text": "hi"})
messages = [HumanMessage("hi")]
with_tools = model("tools").bind_tools([look])
messages.append(with_tools.invoke(messages))
messages += [ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"]) for call in messages[-1].tool_calls]
with_tools.invoke(messages)
asyncio.run(ask())
done()
