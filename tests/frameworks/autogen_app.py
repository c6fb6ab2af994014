"""An app of AutoGen with a tracer provider: `autogen_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

from autogen_agentchat.agents import AssistantAgent  # noqa: E402
from autogen_agentchat.conditions import MaxMessageTermination  # noqa: E402
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm  # noqa: E402
from autogen_agentchat.tools import AgentTool  # noqa: E402
from autogen_ext.models.openai import OpenAIChatCompletionClient  # noqa: E402
from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402

trace.set_tracer_provider(TracerProvider())
INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


async def look(at: str) -> str:
    """Look at something."""
    if at == "void":
        raise ValueError("there is nothing")
    return f"the {at} is blue"


def agent(name: str, **options: object) -> AssistantAgent:
    """Make one, with a model of its own."""
    client = OpenAIChatCompletionClient(
        model=f"gpt-{name}", base_url=sys.argv[2], api_key="sk-test", model_info=INFO, parallel_tool_calls=False
    )
    return AssistantAgent(name, client, description=name, **options)


async def main() -> None:
    """Run them all."""
    painter = agent("painter", tools=[look], max_tool_iterations=5)
    guide = agent("guide", tools=[AgentTool(painter)], reflect_on_tool_use=True)
    await guide.run(task="What colour?")
    async for _ in agent("streamer", model_client_stream=True).run_stream(task="hi"):
        pass
    team = RoundRobinGroupChat([agent("one"), agent("two")], termination_condition=MaxMessageTermination(3))
    await team.run(task="hi")
    with art.trajectory("app"):
        swarm = Swarm(
            [agent("first", handoffs=["second"]), agent("second")], termination_condition=MaxMessageTermination(4)
        )
        await swarm.run(task="hi")
    await asyncio.gather(*(agent(name).run(task="hi") for name in ("left", "right")))


asyncio.run(main())
told = art.status()
art.unpatch()
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
