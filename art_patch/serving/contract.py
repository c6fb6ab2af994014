"""The HTTP contract of an engine, and the two protocols behind it. vLLM and the embedded engine both keep it.

HTTP, on loopback, every error as `{"error": {"message", "type", "param", "code"}}`:

`GET /health`
    200 when requests are answered.
`GET /v1/models`
    Every served name: the bare base as `NAME@0`, each policy as `NAME@STEP`.
`POST /v1/chat/completions`
    OpenAI's chat completions for text and function tools, whole or streamed. `return_token_ids: true` adds
    `prompt_token_ids` (top level; in a stream on each choice's first chunk) and `choices[i].token_ids`. A sampled stop
    token is among the ids, so with n = 1: `len(token_ids) == usage.completion_tokens == len(logprobs.content)`.
    A log-probability is that of the token under the distribution at the request's temperature before any top_p cut,
    `log_softmax(logits / T)`; at temperature 0 it is `log_softmax(logits)`. Left out, temperature and top_p are 1,
    whatever the checkpoint suggests. `model` is the policy that answered. Requests wait by `priority`, smaller first,
    default 0. Requests of the job have a larger number and so wait for the app's calls.
    A parameter that cannot be honoured exactly is refused with 400, an unknown policy with 404, a full queue with 503.
    Patched apps then ask their provider.
`POST /exact/v1/chat/completions`
    The same for scripts that train by hand, see `ExactRoute` in `art_patch.serving.server`. `GET /exact/v1/models`
    goes with it.
`POST /v1/load_lora_adapter {"lora_name": "agent@3"}`
    Validates `adapters_root/agent@3` and serves it, while requests run. 400 says why not. A name is loaded once.
`POST /v1/unload_lora_adapter {"lora_name": "agent@3"}`
    New requests get 404; running requests finish on that policy.

With an API key every route but `/health` asks for `Authorization: Bearer KEY`. Without one, loading and unloading ask
for the project's key (`admin.key` in its directory), so that no other user of the machine does it. Web pages are
refused: an unknown `Host` on loopback or an `Origin` with 403, a body without a JSON content type with 415.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from art_patch.errors import EngineError

MAX_BODY_BYTES = 64 << 20
"""Largest body of a request; a larger one is refused with 413."""

EXACT_PREFIX = "/exact"
"""Begins the paths of the routes whose choices carry exact tokens; `/v1` follows."""


class UnknownPolicy(EngineError):
    """The engine serves no policy of that name."""


class Overloaded(EngineError):
    """The engine cannot take a request now: its queue is full, or it is starting or closing."""


class Served(Protocol):
    """An engine as its own HTTP server uses it (`art_patch.serving.server`)."""

    @property
    def base_policy(self) -> str:
        """Name of the bare base, `NAME@0`."""
        ...

    @property
    def adapters_root(self) -> Path:
        """Directory of published adapters, resolved."""
        ...

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens in prompt and answer together."""
        ...

    @property
    def chat(self) -> Callable[[Any, Any, Any], Awaitable[None]]:
        """ASGI application that answers chat completions."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether the engine answers requests."""
        ...

    def policies(self) -> list[str]:
        """Returns the served names, the base first."""
        ...

    async def start(self) -> None:
        """Gets ready to answer; called once, on the event loop of the server."""
        ...

    async def stop(self) -> None:
        """Ends the engine in order, after the last request."""
        ...

    async def load(self, name: str) -> None:
        """Validates a published adapter and serves it, or raises `AdapterRejected`."""
        ...

    async def unload(self, name: str) -> None:
        """Serves no new requests of a policy, or raises `UnknownPolicy` (`AdapterRejected` for the base)."""
        ...

    def close(self) -> None:
        """Ends the engine at once; can be called twice."""
        ...


class Engine(Protocol):
    """An engine as the job uses it; `EngineClient` is one. Each method raises `EngineError` if the engine fails."""

    def health(self) -> bool:
        """Whether the engine answers requests; False, without an error, where nothing listens."""
        ...

    def models(self) -> list[str]:
        """Returns the served policy names, the base first."""
        ...

    def load(self, name: str) -> None:
        """Serves the published adapter `NAME@STEP`, or raises `AdapterRejected`."""
        ...

    def unload(self, name: str) -> None:
        """Stops serving a policy; its running requests finish."""
        ...

    def chat(self, **body: Any) -> dict[str, Any]:
        """Returns one whole chat completion; body and answer are OpenAI's JSON."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Returns once `health` is True."""
        ...
