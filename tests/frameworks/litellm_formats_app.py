"""An app of LiteLLM that asks many providers: `litellm_formats_app.py STORE URL`. Prints what it got, what was told."""

import asyncio
import json
import os
import sys
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "k"}
os.environ |= {"AWS_REGION_NAME": "us-east-1", "WATSONX_PROJECT_ID": "p", "COHERE_API_KEY": "k"}

import art_patch as art

art.patch(store=sys.argv[1], mode="record", flush_interval_s=0.01)

import litellm  # noqa: E402

litellm.suppress_debug_info = True
URL = sys.argv[2]

# Model -> where it is asked, below the server's address, and further arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai/m": ("/v1", {}),
    "azure/m": ("", {"api_version": "2024-10-21"}),
    "hosted_vllm/m": ("/v1", {}),
    "openrouter/m": ("/v1", {}),
    "deepseek/m": ("/v1", {}),
    "groq/m": ("/v1", {}),
    "mistral/m": ("/v1", {}),
    "codestral/m": ("/v1/chat/completions", {}),
    "together_ai/m": ("/v1", {}),
    "fireworks_ai/m": ("/v1", {}),
    "perplexity/m": ("/v1", {}),
    "xai/m": ("/v1", {}),
    "nvidia_nim/m": ("/v1", {}),
    "cerebras/m": ("/v1", {}),
    "sambanova/m": ("/v1", {}),
    "deepinfra/m": ("/v1", {}),
    "databricks/m": ("/serving-endpoints", {}),
    "huggingface/m": ("/v1/chat/completions", {}),
    "watsonx/m": ("", {"token": "t", "project_id": "p"}),
    "cohere_chat/m": ("/v2/chat", {}),
    "cohere/m": ("/v2/chat", {}),
    "anthropic/m": ("", {}),
    "gemini/m": ("", {}),
    "ollama/m": ("", {}),
    "ollama_chat/m": ("", {}),
    "cloudflare/m": ("/cloudflare/", {}),
    "bedrock/converse/m": ("", {}),
    "azure_ai/m": ("/v1", {}),
    "lm_studio/m": ("/v1", {}),
    "github/m": ("/v1", {}),
}


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content or ""


def delta_of(chunk: Any) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def whole(ask: dict[str, Any]) -> str:
    return text_of(litellm.completion(**ask))


def stream(ask: dict[str, Any]) -> str:
    return "".join(map(delta_of, litellm.completion(**ask, stream=True)))


def asynchronous(ask: dict[str, Any]) -> str:
    async def answer() -> str:
        got = text_of(await litellm.acompletion(**ask))
        await asyncio.sleep(0.05)  # LiteLLM tells of ends in a task of its own
        return got

    return asyncio.run(answer())


def asynchronous_stream(ask: dict[str, Any]) -> str:
    async def answer() -> str:
        got = "".join([delta_of(chunk) async for chunk in await litellm.acompletion(**ask, stream=True)])
        await asyncio.sleep(0.05)
        return got

    return asyncio.run(answer())


WAYS = {each.__name__: each for each in (whole, stream, asynchronous, asynchronous_stream)}
found: dict[str, Any] = {}
for model, (path, more) in MODELS.items():
    for name, way in WAYS.items():
        key = f"{model} {name}"
        ask = {"model": model, "messages": [{"role": "user", "content": key}], "api_base": URL + path, "api_key": "k"}
        before = sum(art.status().bypasses.values())
        try:
            got: Any = way(ask | {"num_retries": 0, "timeout": 20} | more)
        except Exception as error:
            got = [type(error).__name__, str(error)[:300]]
        found[key] = [got, sum(art.status().bypasses.values()) - before]

from litellm.litellm_core_utils.thread_pool_executor import executor  # noqa: E402

executor.shutdown()  # where it tells of ends
told = art.status()
art.unpatch()
print(json.dumps({"found": found, "errors": dict(told.errors), "bypasses": dict(told.bypasses)}))
