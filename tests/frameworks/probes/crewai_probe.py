"""CrewAI: its LLM class, agents, crews and flows."""

import asyncio

from probe import URL, done

import crewai
from crewai.tools import tool
from pydantic import BaseModel


class Colour(BaseModel):
    """A colour."""

    name: str


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def llm(model: str, **options: object) -> crewai.LLM:
    """Make one, of CrewAI's own provider for OpenAI."""
    return crewai.LLM(model=model, provider="openai", base_url=URL, api_key="sk-test", **options)


def crew(model: str, **task: object) -> crewai.Crew:
    """A crew of one."""
    agent = crewai.Agent(
        role="Painter", goal="Paint.", backstory="Old.", llm=llm(model), tools=[] if task else [look], max_iter=3
    )
    return crewai.Crew(
        agents=[agent], tasks=[crewai.Task(description="Say hi.", expected_output="Hi.", agent=agent, **task)]
    )


llm("gpt-chat").call("hi")
crewai.LLM(model="openai/gpt-litellm", is_litellm=True, base_url=URL, api_key="sk-test").call("hi")
llm("gpt-stream", stream=True).call("hi")
if hasattr(llm("gpt-chat"), "api"):  # newer releases
    llm("gpt-responses", api="responses").call("hi")
llm("gpt-structured", response_format=Colour).call("hi")
crew("gpt-crew").kickoff()
crew("gpt-output", output_pydantic=Colour).kickoff()
asyncio.run(crew("gpt-crew-async").kickoff_async())
crewai.Agent(role="Painter", goal="Paint.", backstory="Old.", llm=llm("gpt-agent"), tools=[look]).kickoff("hi")
done()
