"""An app of LiteLLM that asks Anthropic and Gemini: `litellm_providers_app.py STORE URL`. Prints what the patch saw."""

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import art_patch as art

art.patch(store=sys.argv[1], mode="record", flush_interval_s=0.01)
warned: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("art_patch").addHandler(handler)

import litellm  # noqa: E402

HI = [{"role": "user", "content": "hi"}]
THERE = {"messages": HI, "api_base": sys.argv[2], "api_key": "k", "max_tokens": 50}


async def ask_asynchronously(model: str) -> None:
    """With a loop."""
    await litellm.acompletion(f"{model}-async", **THERE)
    async for _ in await litellm.acompletion(f"{model}-async-stream", stream=True, **THERE):
        pass
    await asyncio.sleep(0.5)  # LiteLLM tells of ends in a task of its own


with art.trajectory("app"):
    for model in ("anthropic/claude", "gemini/gemini"):
        litellm.completion(f"{model}-whole", **THERE)
        for _ in litellm.completion(f"{model}-stream", stream=True, **THERE):
            pass
        asyncio.run(ask_asynchronously(model))
        with suppress(litellm.InternalServerError, litellm.APIConnectionError, litellm.ServiceUnavailableError):
            litellm.completion(f"{model}-nowhere", **THERE | {"api_base": "http://127.0.0.1:9"}, num_retries=0)
        litellm.completion(f"{model}-mocked", messages=HI, mock_response="nobody was asked")
    with art.suppress():
        litellm.completion("anthropic/claude-suppressed", **THERE)
recorded = dict(art.status().bypasses)
asyncio.run(litellm.anthropic.messages.acreate(model="anthropic/claude-messages", **THERE))
from litellm.litellm_core_utils.thread_pool_executor import executor  # noqa: E402

executor.shutdown()  # where it tells of ends
told = art.status()
art.unpatch()
print(json.dumps({"errors": dict(told.errors), "bypasses": [recorded, dict(told.bypasses)], "warned": warned}))
