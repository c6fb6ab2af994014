"""An app of the OpenAI Agents SDK: `openai_agents_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys
from contextlib import suppress

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

import agents  # noqa: E402
from agents import Agent, GuardrailFunctionOutput, InputGuardrailTripwireTriggered, RunConfig, Runner  # noqa: E402
from openai import AsyncOpenAI  # noqa: E402

client = AsyncOpenAI(api_key="sk-test", base_url=sys.argv[2], max_retries=0)
agents.set_default_openai_client(client, use_for_tracing=False)
agents.set_trace_processors([])  # nothing leaves this machine


@agents.function_tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


@agents.function_tool(failure_error_function=None)
def fail(at: str) -> str:
    """Fail."""
    raise ValueError(at)


@agents.input_guardrail(run_in_parallel=False)
async def polite(context: object, agent: object, text: object) -> GuardrailFunctionOutput:
    """Trips over one word; asks a model itself."""
    await client.chat.completions.create(model="judge", messages=[{"role": "user", "content": str(text)}])
    return GuardrailFunctionOutput(output_info=None, tripwire_triggered="rude" in str(text))


painter = Agent(name="Painter", model="gpt-painter", instructions="Paint.", tools=[look])
critic = Agent(name="Critic", model="gpt-critic", instructions="Judge.")
as_tool = critic.as_tool("ask_critic", "Ask the critic.")
guide = Agent(
    name="Guide",
    model="gpt-guide",
    instructions="Guide.",
    tools=[as_tool],
    handoffs=[painter],
    input_guardrails=[polite],
)
broken = Agent(name="Broken", model="gpt-broken", instructions="Break.", tools=[fail])


async def main() -> None:
    """Run them all."""
    config = RunConfig(workflow_name="gallery", group_id="visit-1", trace_metadata={"lang": "de"})
    streamed = RunConfig(workflow_name="streamed", group_id="visit-2")
    chat = agents.OpenAIChatCompletionsModel("gpt-chat", client)
    await Runner.run(guide, "What colour?", run_config=config)
    result = Runner.run_streamed(Agent(name="Chatty", model=chat, tools=[look]), "And now?", run_config=streamed)
    async for _ in result.stream_events():
        pass
    with suppress(InputGuardrailTripwireTriggered):
        await Runner.run(guide, "rude", run_config=RunConfig(workflow_name="tripped"))
    with suppress(agents.UserError):
        await Runner.run(broken, "break", run_config=RunConfig(workflow_name="broken"))
    socket = Agent(name="Socket", model=agents.OpenAIResponsesWSModel("gpt-socket", client))
    with suppress(Exception):  # nobody answers there
        await Runner.run(socket, "hi", run_config=RunConfig(workflow_name="socket"))
    await client.chat.completions.create(model="alone", messages=[{"role": "user", "content": "hi"}])


asyncio.run(main())
told = art.status()
art.unpatch()
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
