"""The job's way to an engine: `EngineClient`, over the transport of the OpenAI SDK.

Uses the SDK's generic `get` and `post`, which openai 1, 2 and 3 share, so no HTTP library is named here. No retries: a
call that failed says so, and the caller decides. Every failure is an `EngineError`: an `AdapterRejected` where an
adapter was refused, an `EngineRefused` where the engine answered with another HTTP error.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, cast

from art_patch.errors import AdapterRejected, EngineError


class EngineRefused(EngineError):
    """The engine answered with an HTTP error; `status` tells which."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class EngineClient:
    """A client of one engine; safe to use from several threads."""

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout_s: float = 120.0) -> None:
        """Connects lazily.

        Args:
            base_url: `http://127.0.0.1:8000`, with or without `/v1`.
            api_key: Where the engine asks for one.
            timeout_s: For each request.
        """
        from openai import OpenAI

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        # The SDK demands some key; without one the engine does not look at it.
        self._client = OpenAI(base_url=self.base_url, api_key=api_key or "none", max_retries=0, timeout=timeout_s)

    def health(self) -> bool:
        """Whether the engine answers requests."""
        from openai import OpenAIError

        try:
            self._client.get("/health", cast_to=str, options={"timeout": 5.0})
        except OpenAIError:
            return False
        return True

    def models(self) -> list[str]:
        """Served policy names."""
        answer = self._request("GET", "/v1/models")
        try:
            return [str(card["id"]) for card in answer["data"]]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.base_url} is not an engine: /v1/models answered {answer!r:.200}") from error

    def load(self, name: str) -> None:
        """Serves the published adapter `NAME@STEP`."""
        self._request("POST", "/v1/load_lora_adapter", {"lora_name": name})

    def unload(self, name: str) -> None:
        """Stops serving a policy."""
        self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def chat(self, **body: Any) -> dict[str, Any]:
        """One chat completion; `stream` is not for this method."""
        if body.get("stream"):
            raise ValueError("EngineClient.chat does not stream; use the OpenAI SDK for that")
        answer = self._request("POST", "/v1/chat/completions", body)
        if not isinstance(answer, dict) or "choices" not in answer:
            raise EngineError(f"{self.base_url} is not an engine: a chat completion answered {answer!r:.200}")
        return cast("dict[str, Any]", answer)

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the engine answers.

        Raises:
            EngineError: It did not in time.
        """
        deadline = time.monotonic() + timeout_s
        while not self.health():
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"no engine answered at {self.base_url} within {timeout_s:g} s. Start one with `art-patch serve`."
                )
            time.sleep(0.1)

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def __enter__(self) -> EngineClient:
        """Closes on exit."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes its connections."""
        self.close()

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        from openai import APIConnectionError, APIStatusError, OpenAIError

        try:
            if method == "GET":
                return self._client.get(path, cast_to=object)
            return self._client.post(path, cast_to=object, body=body)
        except APIStatusError as error:
            raise self._refusal(path, error.status_code, error.body, str(error)) from error
        except APIConnectionError as error:
            cause = error.__cause__ or error
            raise EngineError(
                f"cannot reach the engine at {self.base_url} ({cause}). Start one with `art-patch serve`."
            ) from error
        except (OpenAIError, ValueError) as error:  # ValueError: a 200 that is no JSON
            raise EngineError(f"{self.base_url}{path} failed: {error}") from error

    def _refusal(self, path: str, status: int, body: object, fallback: str) -> EngineError:
        fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        message = fields.get("message") or fallback
        if fields.get("code") == "adapter_rejected":
            return AdapterRejected(str(message))
        return EngineRefused(f"{self.base_url}{path} answered {status}: {message}", status)
