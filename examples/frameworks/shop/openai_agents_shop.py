"""A shop assistant on the OpenAI Agents SDK. Without its two lines of art_patch it is the same."""

import art_patch as art

art.patch()

import asyncio

import agents
from agents import Agent, ItemHelpers, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

import shop

agents.set_trace_processors([])  # else the SDK would send its traces to OpenAI


def written(item):
    """A step of the run as OpenAI's messages have it."""
    if item.type == "tool_call_item":
        return shop.tool_call(item.raw_item.call_id, item.raw_item.name, item.raw_item.arguments)
    if item.type == "tool_call_output_item":
        return shop.tool_result(item.raw_item["call_id"], item.output)
    return {"role": "assistant", "content": ItemHelpers.text_message_output(item)}


async def run(client, task):
    @function_tool
    def lookup(item: str) -> str:
        """Price of one item."""
        return shop.price(task, item)

    settings = ModelSettings(max_tokens=shop.MOST_TOKENS, temperature=task.get("temperature"))
    model = OpenAIChatCompletionsModel(shop.MODEL, client)
    agent = Agent(name="shop", model=model, tools=[lookup], model_settings=settings)
    try:
        items = (await Runner.run(agent, task["question"], max_turns=shop.MOST_ANSWERS)).new_items
    except agents.AgentsException as error:  # too many turns, or a tool that there is not
        items = error.run_data.new_items
    return shop.joined([{"role": "user", "content": task["question"]}, *map(written, items)])


async def main():
    async with AsyncOpenAI() as client:
        await shop.serve_async(lambda task: run(client, task))


if __name__ == "__main__":
    asyncio.run(main())
