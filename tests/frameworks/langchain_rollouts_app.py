"""A script as for OpenPipe ART: `langchain_rollouts_app.py STORE URL`. Prints the trajectory and what is refused."""

import asyncio
import json
import sys

import art_patch as art

art.patch(store=sys.argv[1])

from art_patch_integrations.langchain import init_chat_model, wrap_rollout  # noqa: E402
from langchain.agents import create_agent  # noqa: E402
from langchain_core.tools import tool  # noqa: E402

HI = {"messages": [("user", "What colour?")]}


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


async def rollout(reward: float) -> art.Trajectory:
    """Ask an agent with a tool, then the model alone."""
    model = init_chat_model("some/model", temperature=0.7)
    await create_agent(model, [look]).ainvoke(HI)
    await model.ainvoke("alone")
    return art.Trajectory(reward=reward, messages_and_choices=[])


async def streams() -> art.Trajectory:
    """Ask as cannot be captured."""
    async for _ in init_chat_model().astream("hi"):
        pass
    raise AssertionError


async def at_once() -> art.Trajectory:
    """Ask in this thread."""
    init_chat_model().invoke("hi")
    raise AssertionError


async def main() -> dict[str, object]:
    """Run them."""
    model = art.Model(name="learner", project="p", inference_base_url=sys.argv[2])
    found = await wrap_rollout(model, rollout)(0.5)
    refused: list[str] = []
    for refusing in (streams, at_once):
        try:
            await wrap_rollout(model, refusing)()
        except art.ConfigError as error:
            refused.append(str(error))
    try:
        init_chat_model()
    except art.ConfigError as error:
        refused.append(str(error))
    histories = [history.messages() for history in found.histories()]
    return {
        "reward": found.reward,
        "choices": len(found.choices()),
        "roles": [[message["role"] for message in history] for history in histories],
        "tools": [None if history.tools is None else len(history.tools) for history in found.histories()],
        "refused": refused,
    }


print(json.dumps({**asyncio.run(main()), "errors": dict(art.status().errors)}))
