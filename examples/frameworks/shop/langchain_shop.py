"""A shop assistant on LangChain's `create_agent`. Without its two lines of art_patch it is the same."""

import art_patch as art

art.patch()

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import convert_to_openai_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import shop


def run(task):
    @tool
    def lookup(item: str) -> str:
        """Price of one item."""
        return shop.price(task, item)

    model = ChatOpenAI(model=shop.MODEL, max_tokens=shop.MOST_TOKENS, temperature=task.get("temperature"))
    limit = ModelCallLimitMiddleware(run_limit=shop.MOST_ANSWERS, exit_behavior="end")
    agent = create_agent(model, [lookup], middleware=[limit], name="shop")
    return convert_to_openai_messages(agent.invoke({"messages": [("user", task["question"])]})["messages"])


if __name__ == "__main__":
    shop.serve(run)
