"""A shop assistant as a graph of LangGraph. Without its two lines of art_patch it is the same."""

import art_patch as art

art.patch()

from langchain_core.messages import convert_to_openai_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

import shop


def assistant(task):
    @tool
    def lookup(item: str) -> str:
        """Price of one item."""
        return shop.price(task, item)

    model = ChatOpenAI(model=shop.MODEL, max_tokens=shop.MOST_TOKENS, temperature=task.get("temperature"))
    model = model.bind_tools([lookup])

    def think(state: MessagesState):
        return {"messages": [model.invoke(state["messages"])]}

    def next_step(state: MessagesState):
        answers = sum(message.type == "ai" for message in state["messages"])
        return "look" if state["messages"][-1].tool_calls and answers < shop.MOST_ANSWERS else END

    graph = StateGraph(MessagesState).add_node(think).add_node("look", ToolNode([lookup]))
    graph.add_edge(START, "think").add_edge("look", "think").add_conditional_edges("think", next_step, ["look", END])
    return graph.compile(name="shop")


def run(task):
    state = assistant(task).invoke({"messages": [("user", task["question"])]})
    return convert_to_openai_messages(state["messages"])


if __name__ == "__main__":
    shop.serve(run)
