"""An app of LlamaIndex: `llama_index_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import sys
from contextlib import suppress

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)

from llama_index.core import Document, SummaryIndex  # noqa: E402
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent  # noqa: E402
from llama_index.core.memory import Memory  # noqa: E402
from llama_index.core.tools import QueryEngineTool  # noqa: E402
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step  # noqa: E402
from llama_index.llms.openai import OpenAI, utils  # noqa: E402
from pydantic import BaseModel  # noqa: E402


class Colour(BaseModel):
    """A colour."""

    n: int


def look(at: str) -> str:
    """Look at something."""
    if at == "void":
        raise ValueError("there is nothing")
    return f"the {at} is blue"


def llm(model: str) -> OpenAI:
    """Make one; the class wants to know how long a prompt of its model may be."""
    utils.ALL_AVAILABLE_MODELS[model] = utils.CHAT_MODELS[model] = 8192
    return OpenAI(model=model, api_base=sys.argv[2], api_key="sk-test", max_retries=0)


class Flow(Workflow):
    """A workflow of the app's own, with an agent inside."""

    @step
    async def draft(self, ev: StartEvent) -> StopEvent:
        """Ask a model, and an agent."""
        await llm("gpt-draft").acomplete("hi")
        answer = await FunctionAgent(name="Helper", llm=llm("gpt-helper"), streaming=False).run("help")
        return StopEvent(result=str(answer))


index = SummaryIndex.from_documents([Document(text="The sky is blue.", id_="d1")])
facts = QueryEngineTool.from_defaults(index.as_query_engine(llm=llm("gpt-facts")), name="facts", description="Facts.")
guide = FunctionAgent(
    name="Guide", description="Guides.", llm=llm("gpt-guide"), tools=[facts], can_handoff_to=["Painter"]
)
painter = FunctionAgent(name="Painter", description="Paints.", llm=llm("gpt-painter"), tools=[look])


async def main() -> None:
    """Run them all."""
    team = AgentWorkflow(agents=[guide, painter], root_agent="Guide")
    await team.run(user_msg="What colour?", memory=Memory.from_defaults(session_id="visit-1"))
    await asyncio.gather(*(FunctionAgent(name=name, llm=llm(f"gpt-{name}")).run("hi") for name in ("one", "two")))
    with art.trajectory("app"):
        await Flow().run()
    await ReActAgent(name="Thinker", llm=llm("gpt-thinker"), tools=[look]).run("hi")
    with suppress(Exception):
        await FunctionAgent(name="Counter", llm=llm("gpt-counter"), output_cls=Colour).run("count")
    await index.as_query_engine(llm=llm("gpt-query")).aquery("Colour?")
    await llm("gpt-alone").acomplete("hi")


asyncio.run(main())
told = art.status()
art.unpatch()
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
