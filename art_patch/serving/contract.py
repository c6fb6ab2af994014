"""The HTTP contract of an engine, which vLLM and the embedded engine both keep, and the client that calls it.

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

`GET /livez`, `/readyz`, `/metrics`
    For kubelets and Prometheus; `art_patch.metrics` says what they answer.

If the engine has an API key, every route but `/health`, `/livez` and `/readyz` requires `Authorization: Bearer KEY`. If
it has none, loading and unloading require the project's key (`admin.key` in its directory), so that no other user of
the machine can load a policy. Requests from web pages are refused: an unknown `Host` on loopback or an `Origin` with
403, a body without a JSON content type with 415.

`EngineClient`, by which the job and the commands call an engine, never retries a request; the calling code decides
whether to. Each failure is an `EngineError`: `AdapterRejected` if the engine refused an adapter, `EngineRefused` for
any other HTTP error, and a plain `EngineError` if no answer came.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Self, cast

from art_patch._lib import key_files
from art_patch._lib.loose_json import as_object, parse_object
from art_patch.errors import AdapterRejected, EngineError

if TYPE_CHECKING:
    from art_patch.settings import Settings
    from art_patch.types import Route

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


class EngineRefused(EngineError):
    """The engine answered a request with an HTTP error; `status` is its status code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


_MOST_BYTES = 16 << 20  # of an answer of `/health` or `/v1/models`


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Make a redirect an error: `urllib` would send the key to whatever host it names."""


class EngineClient:
    """HTTP client of one engine: loads and unloads policies, sends chat completions; several threads may share it."""

    def __init__(
        self, base_url: str, api_key: str | None = None, *, admin_key: str | None = None, timeout_s: float = 120.0
    ) -> None:
        """Creates the client; it connects with the first request. `base_url` may end in `/v1`.

        `api_key` is for an engine that requires one on every route. `admin_key` is for one that requires it only for
        loading and unloading; it is ignored if `api_key` is given.
        """
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key or "none"  # the SDK demands some key; without one the engine does not look at it
        self._admin_key = admin_key if api_key is None else None
        self._timeout_s = timeout_s

    @classmethod
    def of_project(cls, settings: Settings, base_url: str, key_file: str | None, *, timeout_s: float = 120.0) -> Self:
        """Returns a client that sends the project's keys; a `ConfigError` says why the engine must not be called.

        `key_file` is the file with the engine's API key, as the store records it; `None` if the engine asks for none.
        """
        key = settings.engine_key(base_url, key_file)
        return cls(base_url, key, admin_key=key_files.admin_key(settings.directory), timeout_s=timeout_s)

    @classmethod
    def of_route(cls, settings: Settings, route: Route) -> Self | None:
        """Returns a client, as `of_project` does, of the project's engine; `None` if no engine is set or recorded."""
        # The user's setting wins over the store, which the server wrote.
        base_url = settings.base_url or route.base_url
        return None if base_url is None else cls.of_project(settings, base_url, route.key_file)

    @cached_property
    def _client(self) -> Any:
        # Imported late, because the SDK takes seconds to import: `health` and `models` use the standard library, and a
        # rollback needs no more. Its generic `post` is the same in openai 1, 2 and 3, so no HTTP library is named here.
        from openai import DefaultHttpxClient, OpenAI

        # A prompt goes to the engine's address and nowhere else: no redirect, no proxy of the environment.
        pool = DefaultHttpxClient(follow_redirects=False, mounts=dict.fromkeys(("http://", "https://", "all://")))
        known: dict[str, Any] = {"base_url": self.base_url, "api_key": self._api_key, "timeout": self._timeout_s}
        return OpenAI(**known, max_retries=0, http_client=pool)

    def health(self, *, timeout_s: float = 5.0) -> bool:
        """Whether `GET /health` succeeds, that is, whether the engine answers requests; False if nothing listens."""
        try:
            self._look("/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    def answers(self, *, timeout_s: float = 5.0) -> bool:
        """Whether any HTTP server listens at the engine's address; an HTTP error counts as an answer, too."""
        try:
            self._look("/health", timeout_s=timeout_s)
        except EngineRefused:
            return True
        except (EngineError, ValueError):  # ValueError: it is no address at all
            return False
        return True

    def models(self) -> list[str]:
        """Returns the names of all policies that the engine serves, from `GET /v1/models`."""
        try:
            answer: Any = json.loads(self._look("/v1/models", timeout_s=self._timeout_s))
        except ValueError as error:
            raise EngineError(f"{self.base_url}/v1/models failed: {error}") from error
        try:
            return [str(card["id"]) for card in answer["data"]]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.base_url} is not an engine: /v1/models answered {answer!r:.200}") from error

    def load(self, name: str) -> None:
        """Makes the engine load and serve the published adapter `NAME@STEP`; raises `AdapterRejected` if it refuses."""
        self._change("/v1/load_lora_adapter", name)

    def unload(self, name: str) -> None:
        """Makes the engine stop serving the policy `name`; requests that it is answering finish."""
        self._change("/v1/unload_lora_adapter", name)

    def chat(self, **body: Any) -> dict[str, Any]:
        """Returns a complete, unstreamed chat completion; raises a `ValueError` if the body sets `stream`."""
        if body.get("stream"):
            raise ValueError("EngineClient.chat does not stream; use the OpenAI SDK for that")
        answer = self._request("/v1/chat/completions", body)
        if "choices" not in (found := as_object(answer)):
            raise EngineError(f"{self.base_url} is not an engine: a chat completion answered {answer!r:.200}")
        return found

    def wait_ready(self, timeout_s: float) -> None:
        """Polls `/health` until the engine answers; raises an `EngineError` if it does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self.health():
            if time.monotonic() >= deadline:
                why = f"no engine answered at {self.base_url} within {timeout_s:g} s"
                raise EngineError(f"{why}. Start one with `art-patch serve`.")
            time.sleep(0.1)

    def close(self) -> None:
        """Closes the HTTP connections to the engine; the engine itself keeps running."""
        if "_client" in vars(self):
            self._client.close()

    def __enter__(self) -> Self:
        """Returns itself; the end of the block closes all connections."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Closes all connections."""
        self.close()

    def __del__(self) -> None:
        """Closes the connections of a client that nobody closed, as the SDK's own HTTP client does."""
        with suppress(Exception):
            self.close()

    def _look(self, path: str, *, timeout_s: float) -> bytes:
        request = urllib.request.Request(self.base_url + path, headers={"Authorization": f"Bearer {self._api_key}"})
        try:
            # As in the app, no proxy of the environment gets the key either.
            opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=timeout_s) as answer:
                return cast("bytes", answer.read(_MOST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                told = parse_object(error.read(_MOST_BYTES))  # its `error` is what the SDK gives as the error's `body`
                raise self._refusal(path, error.code, told.get("error"), str(error.reason)) from error
        except (OSError, HTTPException) as error:
            raise self._unreachable(getattr(error, "reason", error)) from error

    def _change(self, path: str, name: str) -> None:
        # Sent with these two requests alone: no other route needs the key, and it should not travel with every chat.
        shown = {} if self._admin_key is None else {"Authorization": f"Bearer {self._admin_key}"}
        self._request(path, {"lora_name": name}, shown)

    def _request(self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        from openai import APIConnectionError, APIStatusError, OpenAIError

        try:
            return self._client.post(path, cast_to=object, body=body, options={"headers": headers or {}})
        except APIStatusError as error:
            raise self._refusal(path, error.status_code, error.body, str(error)) from error
        except APIConnectionError as error:
            raise self._unreachable(error.__cause__ or error) from error
        except (OpenAIError, ValueError) as error:  # ValueError: a 200 that is no JSON
            raise EngineError(f"{self.base_url}{path} failed: {error}") from error

    def _unreachable(self, cause: object) -> EngineError:
        return EngineError(f"cannot reach the engine at {self.base_url} ({cause}). Start one with `art-patch serve`.")

    def _refusal(self, path: str, status: int, body: object, fallback: str) -> EngineError:
        fields = as_object(body)
        message = fields.get("message") or fallback
        if (code := fields.get("code")) in ("adapter_rejected", "adapter_unavailable"):
            return AdapterRejected(str(message), final=code == "adapter_rejected")
        return EngineRefused(f"{self.base_url}{path} answered {status}: {message}", status)


def exact_url(base_url: str) -> str:
    """Returns the base URL of the engine's `/exact` routes; `base_url` is its own address, with or without `/v1`."""
    return f"{base_url.rstrip('/').removesuffix('/v1')}{EXACT_PREFIX}/v1"
