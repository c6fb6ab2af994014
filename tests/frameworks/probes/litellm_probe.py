"""LiteLLM: through the SDK, and through HTTP clients of its own."""

import asyncio

from probe import URL, done

import litellm

HI = [{"role": "user", "content": "hi"}]
THERE = {"api_base": URL, "api_key": "sk-test"}

litellm.completion("openai/gpt-sdk", messages=HI, **THERE)
for _ in litellm.completion("openai/gpt-sdk-stream", messages=HI, stream=True, **THERE):
    pass
litellm.completion("hosted_vllm/gpt-vllm", messages=HI, **THERE)
for _ in litellm.completion("hosted_vllm/gpt-vllm-stream", messages=HI, stream=True, **THERE):
    pass
litellm.responses(model="openai/gpt-responses", input="hi", **THERE)
asyncio.run(litellm.acompletion("openai/gpt-async", messages=HI, **THERE))

from litellm.litellm_core_utils.thread_pool_executor import executor  # noqa: E402

executor.shutdown()  # where it tells of ends
done()
