"""An app of AG2: `ag2_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys
from typing import Any

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

from ag2 import Agent  # noqa: E402
from ag2.config import OpenAIConfig  # noqa: E402


def look(at: str) -> str:
    """Look at something."""
    if at == "void":
        raise ValueError("there is nothing")
    return f"the {at} is blue"


def agent(name: str, **options: Any) -> Agent:
    """Make one, with a model of its own."""
    return Agent(name, config=OpenAIConfig(f"gpt-{name}", base_url=sys.argv[2], api_key="sk-test"), **options)


async def ask_painter(question: str) -> str:
    """Ask the painter."""
    reply = await agent("painter", tools=[look]).ask(question)
    return str(reply.body)


async def main() -> None:
    """Run them all."""
    reply = await agent("guide", tools=[ask_painter]).ask("What colour?")
    await reply.ask("And now?")
    with art.trajectory("app"):
        await agent("inner").ask("hi")
    await asyncio.gather(*(agent(name).ask("hi") for name in ("left", "right")))


asyncio.run(main())
told = art.status()
art.unpatch()
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
