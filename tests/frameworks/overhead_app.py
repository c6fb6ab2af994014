"""What an armed integration adds to a call: `overhead_app.py FRAMEWORK STORE RUNS`. Prints microseconds as JSON.

An agent whose model asks for a tool seven times before it answers: eight calls and seven tools a run, so what is said
of a run once, and of its tools, is spread over its calls. The answers come from this process, without a network. All
sides are the same patched app in turns, run by run: with the integration's hook where the framework keeps its hooks
(`armed`), with one there that does nothing (`idle`), and with that place as it was before (`bare`). Time is the
thread's own, as the writer thread is measured elsewhere.
"""

import asyncio
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal, get_args

os.environ |= {"OPENAI_API_KEY": "sk-test", "LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import art_patch as art

art.patch(store=sys.argv[2])

import openai  # noqa: E402

logging.disable()
CALLS = 8
HI = [{"role": "user", "content": "hi"}]
http: Any = sys.modules[openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]]  # httpx or httpx2


def answer(request: Any) -> Any:
    """A tool call until the tool was called often enough, then a text."""
    looked = sum(message["role"] == "tool" for message in json.loads(request.content)["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "Hello there!"}
    if looked < CALLS - 1:
        function = {"name": "look", "arguments": '{"at": "sky"}'}
        call = {"id": f"call_{looked}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    finish = "tool_calls" if "tool_calls" in message else "stop"
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "gpt-x", "usage": usage}
    return http.Response(200, json=body | {"choices": [{"index": 0, "finish_reason": finish, "message": message}]})


def look(at: str) -> str:
    """Look at something."""
    return f"the {at} is blue"


transport = http.MockTransport(answer)
Side = Literal["bare", "idle", "armed"]
Swap = Callable[[Side], None]


def langchain() -> tuple[Callable[[], Any], Swap]:
    """`create_agent`."""
    from langchain.agents import create_agent
    from langchain_core.callbacks.base import BaseCallbackHandler
    from langchain_core.tools import tool
    from langchain_core.tracers import context
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="gpt-x", max_retries=0, http_client=http.Client(transport=transport))
    agent = create_agent(model, [tool(look)], name="guide")
    told = [name for name in dir(BaseCallbackHandler) if name.startswith("on_")]
    idle = type("Idle", (BaseCallbackHandler,), {name: lambda *_, **__: None for name in told} | {"run_inline": True})()
    hook = (ContextVar("idle", default=idle), True, None, None)
    return lambda: agent.invoke({"messages": [("user", "hi")]}), swap_list(context._configure_hooks, hook)


def openai_agents() -> tuple[Callable[[], Any], Swap]:
    """`Runner.run`."""
    import agents

    client = openai.AsyncOpenAI(http_client=http.AsyncClient(transport=transport))
    agents.set_trace_processors([])
    model = agents.OpenAIChatCompletionsModel("gpt-x", client)
    agent = agents.Agent(name="Guide", model=model, tools=[agents.function_tool(look)])
    loop = asyncio.new_event_loop()
    held = agents.tracing.get_trace_provider()._multi_processor
    told = agents.tracing.TracingProcessor.__abstractmethods__
    idle = type("Idle", (agents.tracing.TracingProcessor,), {name: lambda *_, **__: None for name in told})()
    return lambda: loop.run_until_complete(agents.Runner.run(agent, "hi")), swap_tuple(held, "_processors", idle)


def pydantic_ai() -> tuple[Callable[[], Any], Swap]:
    """`Agent.run`, instrumented for OpenTelemetry."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    trace.set_tracer_provider(TracerProvider())
    Agent.instrument_all()
    client = openai.AsyncOpenAI(http_client=http.AsyncClient(transport=transport))
    agent = Agent(OpenAIChatModel("gpt-x", provider=OpenAIProvider(openai_client=client)), name="Guide")
    agent.tool_plain(look)
    loop = asyncio.new_event_loop()
    held = trace.get_tracer_provider()._active_span_processor
    return lambda: loop.run_until_complete(agent.run("hi")), swap_tuple(held, "_span_processors", SpanProcessor())


def litellm() -> tuple[Callable[[], Any], Swap]:
    """Eight calls through the SDK, which the integration leaves to the patch."""
    import litellm
    from litellm.integrations.custom_logger import CustomLogger

    client = openai.OpenAI(http_client=http.Client(transport=transport))

    def run() -> None:
        for _ in range(CALLS):
            litellm.completion("openai/gpt-x", messages=HI, client=client)

    return run, swap_list(litellm.callbacks, CustomLogger())


def swap_list(held: list[Any], idle: Any) -> Swap:
    """Take our entries out of a list of hooks, put in one that does nothing, or put ours in again."""
    ours = [each for each in held if "art_patch" in repr(each)]
    others = [each for each in held if each not in ours]
    assert ours, held

    def swap(side: Side) -> None:
        held[:] = [*others, *{"bare": [], "idle": [idle], "armed": ours}[side]]

    return swap


def swap_tuple(holder: Any, name: str, idle: Any) -> Swap:
    """The same where all of the hooks are ours."""
    sides: dict[Side, tuple[Any, ...]] = {"bare": (), "idle": (idle,), "armed": getattr(holder, name)}
    assert sides["armed"]
    return lambda side: setattr(holder, name, sides[side])


call, swap = globals()[sys.argv[1]]()
sides: tuple[Side, ...] = get_args(Side)
times: dict[Side, list[float]] = {side: [] for side in sides}
for number in range(int(sys.argv[3])):
    for side in (*sides[number % 3 :], *sides[: number % 3]):
        swap(side)
        begun = time.thread_time()
        call()
        times[side].append(time.thread_time() - begun)
    if number % 50 == 0:
        art.flush(30)
of = {side: statistics.median(each[len(each) // 10 :]) / CALLS * 1e6 for side, each in times.items()}
print(json.dumps({f"{side}_us": of[side] for side in sides} | {"errors": dict(art.status().errors)}))
