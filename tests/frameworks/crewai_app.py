"""An app of CrewAI: `crewai_app.py STORE URL`. Prints the patch's `status()`."""

import json
import os
import sys
from contextlib import suppress
from typing import Any

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)
os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_STORAGE_DIR": os.path.dirname(sys.argv[1].removeprefix("sqlite:///")),
    "OPENAI_API_KEY": "sk-test",
}

from crewai import LLM, Agent, Crew, Task  # noqa: E402
from crewai.events.event_bus import crewai_event_bus  # noqa: E402
from crewai.events.types.knowledge_events import KnowledgeRetrievalStartedEvent  # noqa: E402
from crewai.flow.flow import Flow, listen, start  # noqa: E402
from crewai.tools import tool  # noqa: E402


@tool
def look(at: str) -> str:
    """Look at something."""
    if at == "void":
        raise ValueError("there is nothing")
    return f"the {at} is blue"


def agent(role: str, **options: object) -> Agent:
    """Make one, with a model of its own."""
    llm = LLM(model=f"gpt-{role.lower()}", provider="openai", base_url=sys.argv[2], api_key="sk-test")
    return Agent(role=role, goal="Do it.", backstory="Old.", llm=llm, max_retry_limit=0, **options)


def task(description: str, worker: Agent, **options: object) -> Task:
    """Make one."""
    return Task(name=description, description=description, expected_output="Text.", agent=worker, **options)


def polite(output: object) -> tuple[bool, Any]:
    """Refuse the first answer."""
    return ("blue" in str(output), "say blue" if "blue" not in str(output) else output)


def break_down(output: object) -> tuple[bool, Any]:
    """Fail, after a retrieval that never ends."""
    crewai_event_bus.emit(output, KnowledgeRetrievalStartedEvent())
    raise RuntimeError("broken guardrail")


class Visit(Flow):
    """A flow with a crew in a method."""

    @start()
    def greet(self) -> str:
        """Ask nobody."""
        return "hello"

    @listen(greet)
    def show(self, greeting: str) -> str:
        """Let a crew work."""
        helper = agent("Helper")
        return Crew(name="inner", agents=[helper], tasks=[task("help", helper)]).kickoff().raw


class Broken(Flow):
    """A flow that fails."""

    @start()
    def fail(self) -> str:
        """Fail, after a call."""
        agent("Faller").kickoff("fall")
        raise ValueError("broken")


painter, critic = agent("Painter", tools=[look]), agent("Critic")
paint, judge = task("paint", painter, async_execution=True), task("judge", critic, guardrail=polite)
Crew(name="gallery", agents=[painter, critic], tasks=[paint, judge]).kickoff(inputs={"colour": "blue"})
Visit().kickoff(inputs={"id": "visit-1"})
with suppress(ValueError):
    Broken().kickoff()
faller = agent("Faller")
with suppress(RuntimeError):
    Crew(name="failing", agents=[faller], tasks=[task("fall", faller, guardrail=break_down)]).kickoff()
with art.trajectory("app"):
    agent("Loner", tools=[look]).kickoff("hi")
agent("Loner").llm.call("hi")
told = art.status()
art.unpatch()
print(
    "\n" + json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)})
)
