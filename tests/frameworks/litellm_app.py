"""An app of LiteLLM: `litellm_app.py STORE URL`. Prints the patch's `status()`, and what it warned of."""

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import art_patch as art

art.patch(store=sys.argv[1], flush_interval_s=0.01)
warned: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("art_patch").addHandler(handler)

import litellm  # noqa: E402

HI = [{"role": "user", "content": "hi"}]
THERE = {"api_base": sys.argv[2], "api_key": "sk-test"}
NOWHERE = {"api_base": "http://127.0.0.1:9/v1", "api_key": "sk-test", "num_retries": 0}


def ask() -> None:
    """Without a loop."""
    litellm.completion("openai/gpt-sdk", messages=HI, **THERE)
    litellm.completion("hosted_vllm/whole", messages=HI, temperature=0.5, **THERE)
    for _ in litellm.completion("hosted_vllm/stream", messages=HI, stream=True, **THERE):
        pass
    litellm.responses(model="openai/gpt-responses", input="hi", **THERE)
    for _ in litellm.responses(model="openai/gpt-responses-stream", input="hi", stream=True, **THERE):
        pass
    with suppress(litellm.exceptions.OpenAIError, litellm.InternalServerError):
        litellm.completion("hosted_vllm/nowhere", messages=HI, **NOWHERE)
    with art.suppress():
        litellm.completion("hosted_vllm/suppressed", messages=HI, **THERE)


async def ask_asynchronously() -> None:
    """With a loop."""
    await litellm.acompletion("openai/gpt-sdk", messages=HI, **THERE)
    await litellm.acompletion("hosted_vllm/whole", messages=HI, **THERE)
    async for _ in await litellm.acompletion("hosted_vllm/stream", messages=HI, stream=True, **THERE):
        pass
    await litellm.aresponses(model="openai/gpt-responses", input="hi", **THERE)
    await asyncio.sleep(0.5)  # LiteLLM tells of ends in a task of its own


with art.trajectory("app"):
    ask()
    with art.span("turn"):
        asyncio.run(ask_asynchronously())
from litellm.litellm_core_utils.thread_pool_executor import executor  # noqa: E402

executor.shutdown()  # where it tells of ends
told = art.status()
art.unpatch()
shown = {
    "instrumented": told.instrumented,
    "errors": dict(told.errors),
    "bypasses": dict(told.bypasses),
    "warned": warned,
}
print(json.dumps(shown))
