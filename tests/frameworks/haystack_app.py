"""An app of Haystack: `haystack_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import os
import sys

import art_patch as art

os.environ |= {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": sys.argv[2], "HAYSTACK_TELEMETRY_ENABLED": "False"}
art.patch(store=sys.argv[1], flush_interval_s=0.01)

from haystack import Document, Pipeline  # noqa: E402
from haystack.components.agents import Agent  # noqa: E402
from haystack.components.builders import ChatPromptBuilder  # noqa: E402
from haystack.components.generators.chat import OpenAIChatGenerator  # noqa: E402
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever  # noqa: E402
from haystack.dataclasses import ChatMessage  # noqa: E402
from haystack.document_stores.in_memory import InMemoryDocumentStore  # noqa: E402
from haystack.tools import Tool  # noqa: E402

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def pipeline() -> Pipeline:
    """Retrieve, and answer."""
    documents = InMemoryDocumentStore()
    documents.write_documents([Document(content="The sky is blue.")])
    made = Pipeline(metadata={"name": "facts"})
    made.add_component("find", InMemoryBM25Retriever(documents))
    made.add_component("prompt", ChatPromptBuilder([ChatMessage.from_user("{{documents}}")], required_variables="*"))
    made.add_component("llm", OpenAIChatGenerator(model="gpt-pipeline"))
    made.connect("find.documents", "prompt.documents")
    made.connect("prompt.prompt", "llm.messages")
    return made


def agent(model: str) -> Agent:
    """Make an agent."""
    tool = Tool(name="look", description="Look at something.", parameters=SCHEMA, function=look)
    made = Agent(chat_generator=OpenAIChatGenerator(model=model), tools=[tool])
    made.warm_up()
    return made


HI = [ChatMessage.from_user("hi")]
pipeline().run({"find": {"query": "sky"}})
agent("gpt-agent").run(messages=HI)
asyncio.run(agent("gpt-async").run_async(messages=HI))
inside = Pipeline()
inside.add_component("painter", agent("gpt-inside"))
with art.trajectory(name="app"):
    inside.run({"painter": {"messages": HI}})

assert art.flush(30)
told = art.status()
art.unpatch()
agent("gpt-unpatched").run(messages=HI)
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
