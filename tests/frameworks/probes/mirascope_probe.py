"""Mirascope: calls of release 2, over chat completions and Responses; those of release 1 over chat completions."""

import asyncio
from importlib.util import find_spec

from probe import done

from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def say() -> str:
    """Say hi."""
    return "hi"


async def say_async() -> str:
    """Say hi."""
    return "hi"


def run_calls() -> None:
    """Calls of release 2."""
    from mirascope import llm

    llm.call("openai/gpt-chat:completions")(say)()
    for _ in llm.call("openai/gpt-stream:completions")(say).stream().text_stream():
        pass
    asyncio.run(llm.call("openai/gpt-async:completions")(say_async)())
    for kind in ("completions", "responses"):
        response = llm.call(f"openai/gpt-tools-{kind}:{kind}", tools=[llm.tool(look)])(say)()
        response.resume(response.execute_tools())
    llm.call("openai/gpt-structured:completions", format=Colour)(say)()
    llm.call("openai/gpt-responses:responses")(say)()
    for _ in llm.call("openai/gpt-responses-stream:responses")(say).stream().text_stream():
        pass


def run_old_calls() -> None:
    """Calls of release 1."""
    from mirascope.core import openai

    prompt = openai.call
    prompt("gpt-chat")(say)()
    for _ in prompt("gpt-stream", stream=True)(say)():
        pass
    asyncio.run(prompt("gpt-async")(say_async)())
    response = prompt("gpt-tools", tools=[look])(say)()
    assert response.tool is not None and response.tool.call() == "the sky is blue"
    prompt("gpt-structured", response_model=Colour)(say)()


if find_spec("mirascope.llm.models"):
    run_calls()
else:
    run_old_calls()
done()
