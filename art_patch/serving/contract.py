"""The HTTP contract of an engine, which vLLM and the embedded engine both keep, and its methods for the job.

Without an API key the engine listens on loopback only. Every error response is `{"error": {"message", "type", "param",
"code"}}`.

`GET /health`
    200 if the engine is ready to answer requests.
`GET /v1/models`
    Lists every served name: the base model without a LoRA as `NAME@0`, each policy as `NAME@STEP`.
`POST /v1/chat/completions`
    OpenAI's chat completions for text and function tools, streamed or not. `return_token_ids: true` adds
    `prompt_token_ids` (top level; in a stream on each choice's first chunk) and `choices[i].token_ids`. The ids include
    a sampled stop token, so with n = 1: `len(token_ids) == usage.completion_tokens == len(logprobs.content)`. A token's
    log-probability is taken at the request's temperature before any top_p cut, `log_softmax(logits / T)`; at
    temperature 0 it is `log_softmax(logits)`. Under `response_format` and a forced `tool_choice` it is taken among the
    tokens that the schema allows. If the request leaves out temperature or top_p, it is 1, even if the checkpoint's
    generation config says otherwise. `model` in the answer is the policy that answered. Waiting requests
    are ordered by `priority`, smaller first, default 0. Requests of the job have a larger number, so the app's calls
    are answered before them. The engine refuses a parameter that it cannot honour exactly with 400, an unknown policy
    with 404, and a request that it has no room for with 429 and `Retry-After`. A patched app then sends that call to
    its provider.
    A request waits for its turn unless 1,024 requests wait already. If it has the header `x-art-patch-wait:
    SECONDS`, it is also refused at once if it is expected to wait longer. Patched apps send this header.
`POST /exact/v1/chat/completions`
    The same route for scripts that train by hand, with the exact tokens in each choice; see `ExactRoute` in
    `art_patch.serving.server`. `GET /exact/v1/models` is `GET /v1/models` under that prefix.
`POST /v1/load_lora_adapter {"lora_name": "agent@3"}`
    Validates `adapters_root/agent@3` and serves it while other requests run. If the adapter is refused, or a policy of
    that name is served already, the answer is 400 with the reason.
`POST /v1/unload_lora_adapter {"lora_name": "agent@3"}`
    Stops serving the policy: new requests for it get 404; running requests for it finish.

If the engine has an API key, every route but `/health` requires `Authorization: Bearer KEY`. If it has none, loading
and unloading require the project's key (`admin.key` in its directory), so that no other user of the machine can load a
policy. Requests from web pages are refused: an unknown `Host` on loopback or an `Origin` with 403, a body without a
JSON content type with 415.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from art_patch.errors import AdapterRejected, EngineError

EXACT_PREFIX = "/exact"  # before `/v1` in the path of the routes whose answers carry exact tokens in each choice


class UnknownPolicy(EngineError):
    """A request names a policy that the engine does not serve."""


class Overloaded(EngineError):
    """The engine cannot take a request now: its queue is full, or it is starting or closing."""


class EngineFull(Overloaded):
    """The engine has no room for a request now; `retry_s` is when to ask again, in seconds."""

    def __init__(self, why: str, retry_s: float) -> None:
        super().__init__(f"the engine is full: {why}; try again later")
        self.retry_s = retry_s


def admit(*, waiting: int, most: int, expected_s: float, accepted_s: float | None) -> None:
    """Raises `EngineFull` for a request if `most` requests wait, or if it would wait longer than it accepts.

    Args:
        expected_s: seconds that the request is expected to wait for its turn; infinite if that is not known.
        accepted_s: seconds that the caller accepts; `None` for any.
    """
    if waiting >= most:
        why = f"{waiting} requests wait already"
    elif accepted_s is not None and expected_s > accepted_s:
        why = f"it would take more than {accepted_s:g} s until the turn of this request"
    else:
        return
    # When half of the queue is answered: later the engine might run out of work, earlier it would only refuse again.
    raise EngineFull(why, max(0.05, min(expected_s, 1.0 if accepted_s is None else accepted_s) / 2))


def unknown_model(name: str, served: Sequence[str]) -> UnknownPolicy:
    """Returns, without raising it, the error for a chat request to a policy that is not among those `served`."""
    return UnknownPolicy(f"The model `{name}` does not exist. Served models: {', '.join(served)}.")


def check_new(name: str, served: Sequence[str]) -> None:
    """Raises `AdapterRejected` if a policy to load has the name of one that is `served` already."""
    if name in served:
        raise AdapterRejected(
            f"{name} is served already and a policy never changes. Publish the new weights as the next step."
        )


def check_unload(name: str, served: Sequence[str]) -> None:
    """Raises `AdapterRejected` if `name` is the base, the first of `served`; `UnknownPolicy` if it is none of them."""
    if name == served[0]:
        raise AdapterRejected(f"{name} is the base model and cannot be unloaded. Stop the server instead.")
    if name not in served:
        raise UnknownPolicy(f"The adapter `{name}` is not served. Served models: {', '.join(served)}.")


class Engine(Protocol):
    """What the training job calls, as `EngineClient` has it; each method raises `EngineError` if the engine fails."""

    def health(self) -> bool:
        """Whether the engine answers requests; returns False instead of raising if nothing listens."""
        ...

    def models(self) -> list[str]:
        """Returns the names of all served policies, the base model first."""
        ...

    def load(self, name: str) -> None:
        """Makes the engine serve the published adapter `NAME@STEP`; raises `AdapterRejected` if it refuses."""
        ...

    def unload(self, name: str) -> None:
        """Makes the engine stop serving the policy `name`; its running requests finish."""
        ...

    def chat(self, **body: Any) -> dict[str, Any]:
        """Returns a complete, unstreamed chat completion; `body` and result are OpenAI's JSON."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Returns as soon as `health` is True; raises an `EngineError` if that takes longer than `timeout_s`."""
        ...
