"""LangGraph: a graph with tools, whole and streamed, with a loop and without, and a graph inside a graph."""

import asyncio
from typing import Any

from probe import done

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

HI = {"messages": [("user", "hi")]}


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


def graph(door: str, *more: Any) -> Any:
    """A model and a tool, in turns."""
    model = ChatOpenAI(model=f"gpt-{door}", max_retries=0).bind_tools([look])
    made = StateGraph(MessagesState)
    made.add_node("think", lambda state: {"messages": [model.invoke(state["messages"])]})
    made.add_node("tools", ToolNode([look]))
    for each in more:
        made.add_node("inner", each)
        made.add_edge(START, "inner").add_edge("inner", "think")
    if not more:
        made.add_edge(START, "think")
    made.add_edge("tools", "think").add_conditional_edges("think", tools_condition, {"tools": "tools", END: END})
    return made.compile(name=door)


async def ask() -> None:
    """With a loop."""
    await graph("async").ainvoke(HI)
    async for _ in graph("async-stream").astream(HI, stream_mode="messages"):
        pass


graph("invoke").invoke(HI)
for _ in graph("stream").stream(HI, stream_mode="updates"):
    pass
graph("outer", graph("inner")).invoke(HI)
asyncio.run(ask())
done()
