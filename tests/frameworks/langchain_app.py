"""An app of LangChain and LangGraph: `langchain_app.py STORE URL`. Prints the patch's `status()`."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)
os.environ |= {"OPENAI_API_KEY": "sk-test", "OPENAI_BASE_URL": sys.argv[2], "LANGSMITH_TRACING": "false"}

import httpx  # noqa: E402
import openai  # noqa: E402
import uvicorn  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from fastapi.responses import StreamingResponse  # noqa: E402
from langchain_core.documents import Document  # noqa: E402
from langchain_core.messages import HumanMessage  # noqa: E402
from langchain_core.output_parsers import JsonOutputParser  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402
from langchain_core.retrievers import BaseRetriever  # noqa: E402
from langchain_core.tools import tool  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402
from langgraph.checkpoint.memory import InMemorySaver  # noqa: E402
from langgraph.func import entrypoint, task  # noqa: E402
from langgraph.graph import START, MessagesState, StateGraph  # noqa: E402
from langgraph.prebuilt import ToolNode  # noqa: E402
from langgraph.types import Command, interrupt  # noqa: E402
from opentelemetry import trace  # noqa: E402
from pydantic import BaseModel  # noqa: E402

HI = {"messages": [("user", "What colour?")]}


def model(name: str, **options: Any) -> ChatOpenAI:
    """A model that is never asked twice."""
    return ChatOpenAI(model=name, max_retries=0, **options)


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


@tool
def weigh(thing: str) -> str:
    """Weigh something."""
    if thing == "sky":
        raise ValueError("too heavy")
    return "2 kg"


TOOLS = [look, weigh]


def says(name: str) -> Any:
    """A node that asks a model."""
    return lambda state: {"messages": [model(name).invoke(state["messages"])]}


async def plan(state: MessagesState) -> dict[str, Any]:
    """A node that asks a model for tools, in a task."""
    return {"messages": [await model("gpt-planner").bind_tools(TOOLS).ainvoke(state["messages"])]}


def plan_at_once(state: MessagesState) -> dict[str, Any]:
    """The same in a thread."""
    return {"messages": [model("gpt-planner").bind_tools(TOOLS).invoke(state["messages"])]}


def confirm(state: MessagesState) -> dict[str, Any]:
    """A node that waits for a person."""
    return {"messages": [("user", interrupt({"sure": "?"}))]}


def artist(planner: Any) -> Any:
    """Planner, tools, a graph and a node at once, a person, an answer."""
    critic = StateGraph(MessagesState).add_node("judge", says("gpt-judge")).add_edge(START, "judge")
    graph = StateGraph(MessagesState)
    nodes = {
        "planner": planner,
        "tools": ToolNode(TOOLS, handle_tool_errors=True),
        "critic": critic.compile(name="criticism"),
        "checker": says("gpt-checker"),
        "confirm": confirm,
        "answer": says("gpt-answer"),
    }
    for name, node in nodes.items():
        graph.add_node(name, node)
    graph.add_edge(START, "planner").add_edge("planner", "tools")
    graph.add_edge("tools", "critic").add_edge("tools", "checker")
    graph.add_edge(["critic", "checker"], "confirm").add_edge("confirm", "answer")
    return graph.compile(checkpointer=InMemorySaver(), name="artist")


def threads() -> None:
    """Nodes in threads, interrupted and resumed."""
    graph = artist(plan_at_once)
    config = {"configurable": {"thread_id": "visit-1"}, "metadata": {"user_id": "ann", "lang": "de"}, "tags": ["vip"]}
    graph.invoke(HI, config)
    assert graph.get_state(config).next == ("confirm",)
    graph.invoke(Command(resume="yes"), config)


def traced() -> None:
    """The same, in two traces of the app's."""
    graph = artist(plan_at_once)
    for number, given in enumerate((HI, Command(resume="yes")), 1):
        context = trace.SpanContext(number, number, is_remote=False, trace_flags=trace.TraceFlags(1))
        with trace.use_span(trace.NonRecordingSpan(context)):
            graph.invoke(given, {"configurable": {"thread_id": "visit-4"}})


async def served() -> None:
    """The same, streamed over FastAPI, two visitors at once."""
    graph, app = artist(plan), FastAPI()

    @app.post("/{thread}")
    async def run(thread: str, resume: str | None = None) -> StreamingResponse:
        async def parts() -> Any:
            config = {"configurable": {"thread_id": thread}}
            given = HI if resume is None else Command(resume=resume)
            async for chunk, _ in graph.astream(given, config, stream_mode="messages"):
                yield str(chunk.content)

        return StreamingResponse(parts())

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for query in ("", "?resume=yes"):
            answers = await asyncio.gather(*(client.post(f"/visit-{number}{query}") for number in (2, 3)))
            assert all("Hello there!" in answer.text for answer in answers)
    server.should_exit = True
    await running


class Colour(BaseModel):
    """A colour."""

    name: str


class Shelf(BaseRetriever):
    """Has one document."""

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return [Document(f"about {query}", metadata={"page": 1})]


def forms() -> None:
    """Every other way to ask a model, each in its node."""
    calls = {
        "stream": lambda state: [str(chunk.content) for chunk in model("gpt-stream").stream("hi")],
        "structured": lambda state: model("gpt-structured").with_structured_output(Colour).invoke("hi"),
        "responses": lambda state: model("gpt-responses", use_responses_api=True).invoke("hi"),
        "several": lambda state: model("gpt-several").generate([[HumanMessage("a")], [HumanMessage("b")]]),
        "batch": lambda state: (ChatPromptTemplate.from_template("{x}") | model("gpt-batch")).batch(["a", "b"]),
        "sdk": lambda state: openai.OpenAI().chat.completions.create(model="gpt-sdk", messages=[]),
        "shelf": lambda state: Shelf().invoke("colours"),
    }
    graph = StateGraph(Annotated[dict, lambda old, new: new])
    before = START
    for name, call in calls.items():
        graph.add_node(name, lambda state, call=call: {"said": bool(call(state))})
        graph.add_edge(before, name)
        before = name
    graph.compile(name="forms").invoke({"said": ""})


def functions() -> None:
    """A graph that is written as a function."""
    ask = task(lambda text: model("gpt-task").invoke(text).content, name="ask")

    @entrypoint()
    def flow(text: str) -> str:
        return ask(text).result()

    flow.invoke("hi")


async def agents() -> None:
    """`create_agent` of LangChain, at once and streamed."""
    from langchain.agents import create_agent

    agent = create_agent(model("gpt-agent"), TOOLS[:1], name="painter")
    agent.invoke(HI)
    async for _ in agent.astream_events(HI, version="v2"):
        pass


def failures() -> None:
    """What a parser cannot read, and a node that fails."""
    reads = ChatPromptTemplate.from_template("{x}") | model("gpt-reader") | JsonOutputParser()

    def read(state: Any) -> Any:
        with suppress(ValueError):
            reads.invoke({"x": "json"})
        raise KeyError("lost")

    graph = StateGraph(dict).add_node("read", read).add_edge(START, "read").compile(name="reader")
    with suppress(KeyError):
        graph.invoke({})
    with suppress(ValueError):
        reads.invoke({"x": "alone"})  # whose it is, nobody said
    with art.trajectory("mine"):
        look.invoke({"at": "sea"})
        with suppress(ValueError):
            reads.invoke({"x": "json"})
        judge = StateGraph(MessagesState).add_node("judge", says("gpt-judge")).add_edge(START, "judge")
        judge.compile(name="court").invoke(HI)


async def tasks() -> None:
    """What runs in an event loop; there is one, as LangChain keeps its connections."""
    await served()
    if find_spec("langchain") is not None:  # older ones have none
        await agents()


threads()
traced()
asyncio.run(tasks())
forms()
functions()
failures()
told = art.status()
art.unpatch()
artist(plan_at_once).invoke(HI, {"configurable": {"thread_id": "visit-9"}})
print(json.dumps({"instrumented": told.instrumented, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
