"""Answers a customer: looks up the parcel, asks a person before money is sent back, writes the reply.

An ordinary LangGraph app. Asks the model at `OPENAI_BASE_URL` (OpenAI's own unless set), with `OPENAI_API_KEY`.
"""

from __future__ import annotations

import os
import sys

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

PARCELS = {"17": "lost on 3 May", "18": "at your neighbour's"}
RULES = "You are the support of a shop. Look parcels up; refund those that are lost. Be brief."


@tool
def track(parcel: str) -> str:
    """Say where a parcel is."""
    return PARCELS.get(parcel, "no such parcel")


@tool
def refund(parcel: str) -> str:
    """Send the money back, if a colleague agrees."""
    agreed = interrupt(f"Refund parcel {parcel}? (yes/no) ")
    return "refunded" if agreed == "yes" else "a colleague refused"


def support() -> CompiledStateGraph:
    """Make the agent."""
    model = ChatOpenAI(model=os.environ.get("AGENT_MODEL", "gpt-5-mini")).bind_tools([track, refund])

    def think(state: MessagesState) -> dict:
        return {"messages": [model.invoke([SystemMessage(RULES), *state["messages"]])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think).add_node("tools", ToolNode([track, refund]))
    graph.add_edge(START, "think").add_edge("tools", "think")
    graph.add_conditional_edges("think", tools_condition, {"tools": "tools", END: END})
    return graph.compile(checkpointer=InMemorySaver(), name="support")


def main(question: str) -> None:
    """Answer one question; a person is asked at the keyboard."""
    agent, config = support(), {"configurable": {"thread_id": f"customer-{os.getpid()}"}}
    state = agent.invoke({"messages": [("user", question)]}, config)
    while "__interrupt__" in state:
        state = agent.invoke(Command(resume=input(state["__interrupt__"][0].value).strip()), config)
    print(state["messages"][-1].content)


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Where is parcel 17?")
