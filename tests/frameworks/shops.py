"""The assistants of `examples/frameworks/shop`, each in the environment of its framework, as the demo runs agents."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_patch.demo.processes import Agent, Program, unpatched
from art_patch.demo.shop import make_tasks
from tests.support.environments import ROOT, environment
from tests.support.replies import reply
from tests.support.servers import serving

FOLDER = ROOT / "examples/frameworks/shop"
_LANGCHAIN = ("langchain>=1.4,<2", "langchain-openai>=1.7,<2", "langgraph>=1.2,<2", "openai>=3,<4")
SHOPS = {
    "langchain": _LANGCHAIN,
    "langgraph": _LANGCHAIN,
    "openai_agents": ("openai-agents>=0.24,<1", "websockets>=15,<18"),
    "litellm": ("litellm>=1.106,<2", "mcp>=2,<3"),
    "pydantic_ai": ("pydantic-ai-slim[openai]>=2.68,<3", "opentelemetry-sdk>=1.45,<2"),
}
"""What pip is asked for, by the assistant's name."""


def program(name: str) -> Program:
    """An assistant and its interpreter."""
    python = environment(name.replace("_", "-").replace("langgraph", "langchain"), SHOPS[name])
    variables = {
        "PYTHONPATH": str(FOLDER),
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the network for prices
    }
    return Program((FOLDER / f"{name}_shop.py").read_text(), str(python), variables)


def with_its_tools(given: Program, folder: Path) -> Program:
    """The same, with the tools as its framework writes them; it is asked one question to see them."""
    with serving() as server:
        server.answer = reply
        answer_all(unpatched(given), folder, {"OPENAI_BASE_URL": server.url, "OPENAI_API_BASE": server.url}, size=1)
        return replace(given, tools=server.seen[0].body["tools"])


def answer_all(given: Program, folder: Path, variables: dict[str, str], *, size: int) -> list[dict[str, Any]]:
    """What an assistant makes of some tasks."""
    tasks = make_tasks("traffic", size, seed=1)
    with ExitStack() as stack:
        agent = stack.enter_context(Agent(given, folder / "agent.py", variables, folder / "agent.log"))
        return agent.ask({"question": task.question, "prices": dict(task.prices)} for task in tasks)
