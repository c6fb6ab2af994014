"""Doors: packages whose calls to a model do not pass through the OpenAI SDK, or not always, and what to do about it.

Data only, standard library only: `art-patch doctor` lists the doors that are installed; whoever watches a running
process may read the same table.
"""

from __future__ import annotations

from typing import NamedTuple


class Door(NamedTuple):
    """One way past the patch.

    Attributes:
        package: name of the distribution, as pip knows it.
        bypasses: which of its calls we do not see.
        cure: one line that brings them back.
    """

    package: str
    bypasses: str
    cure: str


_OWN_SDK = "call the model through the OpenAI SDK and an OpenAI-compatible address, if it has one"

DOORS: tuple[Door, ...] = (
    Door(
        "litellm",
        "litellm.responses(), and most providers but openai/ (hosted_vllm/, openrouter/, ...): its own HTTP client",
        "pass the address of `art-patch proxy` as api_base=, with openai/ before the model's name",
    ),
    Door(
        "dspy",
        "dspy.LM with its default engine: its own HTTP client",
        'dspy.LM(..., engine="litellm"), or pass the address of `art-patch proxy` as api_base=',
    ),
    Door(
        "openai-agents",
        "the websocket transport of the Responses API, where it was switched on",
        'agents.set_default_openai_responses_transport("http")',
    ),
    Door(
        "pydantic-ai-slim",
        "the websocket transport of the Responses API, where it was switched on",
        "use the OpenAIResponsesModel over HTTP",
    ),
    Door(
        "websockets",
        "client.realtime.connect() and client.responses.connect() of the OpenAI SDK",
        "call client.responses.create() instead",
    ),
    Door(
        "portkey-ai",
        "all calls: it brings an OpenAI SDK of its own",
        "use OpenAI(base_url=...) with Portkey's address",
    ),
    Door("anthropic", "all calls: an SDK of its own", _OWN_SDK),
    Door("google-genai", "all calls: an SDK of its own", _OWN_SDK),
    Door("boto3", "calls to Bedrock: an SDK of its own", _OWN_SDK),
    Door("ollama", "all calls: an SDK of its own", 'OpenAI(base_url="http://127.0.0.1:11434/v1")'),
    Door("groq", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.groq.com/openai/v1")'),
    Door("mistralai", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.mistral.ai/v1")'),
    Door("together", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.together.xyz/v1")'),
    Door("cohere", "all calls: an SDK of its own", _OWN_SDK),
)
"""Most likely first."""
