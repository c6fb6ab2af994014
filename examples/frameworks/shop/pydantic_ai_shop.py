"""A shop assistant on Pydantic AI, observed by OpenTelemetry. Without its two lines of art_patch it is the same."""

import art_patch as art

art.patch()

import asyncio
from contextlib import suppress

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from pydantic_ai import Agent, Tool, UsageLimits, capture_run_messages
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings

import shop

trace.set_tracer_provider(TracerProvider())
Agent.instrument_all()
LIMITS = UsageLimits(request_limit=shop.MOST_ANSWERS)
GIVEN_UP = (UsageLimitExceeded, UnexpectedModelBehavior)  # too many answers, or a tool that there is not


def written(part):
    """A part of a message as OpenAI's messages have it."""
    if part.part_kind == "tool-call":
        return shop.tool_call(part.tool_call_id, part.tool_name, part.args_as_json_str())
    if part.part_kind in ("tool-return", "retry-prompt"):
        return shop.tool_result(part.tool_call_id, part.content)
    return {"role": "assistant" if part.part_kind == "text" else "user", "content": part.content}


async def run(model, task):
    def lookup(item: str) -> str:
        """Price of one item."""
        return shop.price(task, item)

    settings = ModelSettings(max_tokens=shop.MOST_TOKENS)
    if "temperature" in task:
        settings["temperature"] = task["temperature"]
    agent = Agent(model, tools=[Tool(lookup)], name="shop", model_settings=settings)
    with capture_run_messages() as messages, suppress(*GIVEN_UP):
        await agent.run(task["question"], usage_limits=LIMITS)
    return shop.joined(written(part) for message in messages for part in message.parts)


async def main():
    model = OpenAIChatModel(shop.MODEL)
    await shop.serve_async(lambda task: run(model, task))


if __name__ == "__main__":
    asyncio.run(main())
