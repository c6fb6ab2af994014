"""Lists packages that send some or all of their model calls without the OpenAI SDK, each with a cure.

`art-patch doctor` shows the entries of installed packages; the module `bypass` shows the cure in its warning.
"""

from __future__ import annotations

from typing import NamedTuple


class Bypass(NamedTuple):
    """A package that sends some of its model calls without the OpenAI SDK.

    Attributes:
        package: name of the package on PyPI.
        unseen: the calls that the patch cannot record or route.
        cure: one line of advice that makes these calls go through the patched SDK.
    """

    package: str
    unseen: str
    cure: str


_OWN_SDK = "call the model through the OpenAI SDK and an OpenAI-compatible address, if it has one"

# The most likely come first.
BYPASSES: tuple[Bypass, ...] = (
    Bypass(
        "litellm",
        "litellm.responses(), and most providers but openai/ (hosted_vllm/, openrouter/, ...): its own HTTP client",
        "pass the address of `art-patch proxy` as api_base=, with openai/ before the model's name",
    ),
    Bypass(
        "dspy",
        "dspy.LM with its default engine: its own HTTP client",
        'dspy.LM(..., engine="litellm"), or pass the address of `art-patch proxy` as api_base=',
    ),
    Bypass(
        "openai-agents",
        "the websocket transport of the Responses API, where it was switched on",
        'agents.set_default_openai_responses_transport("http")',
    ),
    Bypass(
        "pydantic-ai-slim",
        "the websocket transport of the Responses API, where it was switched on",
        "use the OpenAIResponsesModel over HTTP",
    ),
    Bypass(
        "websockets",
        "client.realtime.connect() and client.responses.connect() of the OpenAI SDK",
        "call client.responses.create() instead",
    ),
    Bypass(
        "portkey-ai",
        "all calls: it brings an OpenAI SDK of its own",
        "use OpenAI(base_url=...) with Portkey's address",
    ),
    Bypass("anthropic", "all calls: an SDK of its own", _OWN_SDK),
    Bypass("google-genai", "all calls: an SDK of its own", _OWN_SDK),
    Bypass("boto3", "calls to Bedrock: an SDK of its own", _OWN_SDK),
    Bypass("ollama", "all calls: an SDK of its own", 'OpenAI(base_url="http://127.0.0.1:11434/v1")'),
    Bypass("groq", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.groq.com/openai/v1")'),
    Bypass("mistralai", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.mistral.ai/v1")'),
    Bypass("together", "all calls: an SDK of its own", 'OpenAI(base_url="https://api.together.xyz/v1")'),
    Bypass("cohere", "all calls: an SDK of its own", _OWN_SDK),
)
