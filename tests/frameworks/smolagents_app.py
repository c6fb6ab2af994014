"""An app of smolagents: `smolagents_app.py STORE URL`. Prints the patch's `status()`."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

from openai import OpenAI  # noqa: E402
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool  # noqa: E402

client = OpenAI(api_key="sk-test", base_url=sys.argv[2])


def ask(model: str) -> None:
    """Ask a model, outside of any agent."""
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])


@tool
def look(at: str) -> str:
    """Look at something.

    Args:
        at: what.
    """
    if at == "void":
        raise ValueError("there is nothing")
    ask("gpt-eye")
    return f"the {at} is blue"


def agent(kind: Any, name: str, **options: Any) -> Any:
    """Make one, with a model of its own."""
    model = OpenAIModel(f"gpt-{name}", api_base=sys.argv[2], api_key="sk-test")
    return kind(model=model, name=name, description=name, max_steps=4, verbosity_level=0, **options)


painter = agent(ToolCallingAgent, "painter", tools=[look])
agent(ToolCallingAgent, "guide", tools=[], managed_agents=[painter]).run("What colour?")
for _ in agent(CodeAgent, "coder", tools=[look], final_answer_checks=[lambda answer, *_, **__: answer == "blue"]).run(
    "Write.", stream=True
):
    ask("gpt-reader")
with art.trajectory("app"):
    agent(ToolCallingAgent, "inner", tools=[]).run("hi")
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda name: agent(ToolCallingAgent, name, tools=[]).run("hi"), ("left", "right")))
told = art.status()
art.unpatch()
print(
    "\n" + json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)})
)
