"""LiteLLM: records the calls that it sends by its own HTTP clients (`hosted_vllm/`, `anthropic/`, `gemini/`, ...).

A `CustomLogger` in `litellm.callbacks`. LiteLLM reports a call right before it is sent, in the caller's context, and
its end in a thread. Calls through the OpenAI SDK (`openai/`) are left alone, because the patch sees them. The others
are recorded and cannot be routed; `api_base=` with the address of `art-patch proxy` routes them. Calls in the format of
another provider (`litellm.anthropic.messages`, `generate_content()`) are not recorded.

Where LiteLLM uses OpenAI's format, request and answer are kept as they were sent, with token ids. For other providers
and for streams, LiteLLM's translation is kept. A call belongs to the trajectory in force, like any other.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import Any

from art_patch.context.integration import OwnCall, guarded, record_call

MOST_OPEN = 1_000
"""Most open calls; beyond that the oldest count as given up, such as streams that were not read to the end."""

_FOREIGN = ("anthropic_messages", "generate_content")

_APIS: dict[str, Any] = {"/chat/completions": "chat", "/responses": "responses"}


class Calls:
    """The open calls, by LiteLLM's own id. One id is one call with all its retries."""

    def __init__(self) -> None:
        """Begin without open calls."""
        self._lock = RLock()  # re-entrant: the garbage collector may end a call while another begins
        self._open: OrderedDict[str, tuple[OwnCall, bool]] = OrderedDict()

    @guarded("integrations.litellm")
    def sent(self, model: str, messages: Any, told: dict[str, Any]) -> None:
        """A call is about to be sent."""
        key, more = told.get("litellm_call_id"), told.get("additional_args") or {}
        if key is None or key in self._open or any(foreign in str(told.get("call_type")) for foreign in _FOREIGN):
            return
        address = str(more.get("api_base") or "").partition("?")[0]
        api = next((api for end, api in _APIS.items() if address.endswith(end)), None)
        body: dict[str, Any] = more.get("complete_input_dict") or {}
        if api is None:
            body = {**(told.get("optional_params") or {}), "model": model, "messages": messages}
        call = record_call(body, api=api or "chat")
        if call is None:
            return
        with self._lock:
            self._open[key] = call, api is not None and not told.get("stream")
            given_up = self._open.popitem(last=False)[1][0] if len(self._open) > MOST_OPEN else None
        if given_up is not None:
            given_up.end()

    @guarded("integrations.litellm")
    def received(self, told: dict[str, Any]) -> None:
        """The bytes of an answer are here."""
        key, answer = told.get("litellm_call_id"), told.get("original_response")
        _, as_sent = self._open.get(str(key), (None, False))
        if as_sent and isinstance(answer, str) and answer.lstrip().startswith("{"):
            self._end(key, answer)

    @guarded("integrations.litellm")
    def succeeded(self, told: dict[str, Any], answer: Any) -> None:
        """A call is over, a stream read to its end."""
        if hasattr(answer, "model_dump_json"):
            self._end(told.get("litellm_call_id"), answer.model_dump_json(warnings=False))

    @guarded("integrations.litellm")
    def failed(self, told: dict[str, Any]) -> None:
        """A call has failed."""
        self._end(told.get("litellm_call_id"), error=told.get("exception") or "failed")

    def _end(self, key: Any, answer: str | None = None, *, error: Any = None) -> None:
        with self._lock:
            call, _ = self._open.pop(key, (None, False))
        if call is not None:
            call.end(answer, error=error)


def arm(litellm: Any) -> None:
    """Add a logger to those of the app."""
    from litellm.integrations.custom_logger import CustomLogger

    if any(type(each).__name__ == "ArtPatchLogger" for each in litellm.callbacks):
        return
    calls = Calls()

    class ArtPatchLogger(CustomLogger):
        """The callbacks; `Calls` does the work."""

        def log_pre_api_call(self, model: Any, messages: Any, kwargs: Any) -> None:
            calls.sent(model, messages, kwargs)

        def log_post_api_call(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            calls.received(kwargs)

        def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            calls.succeeded(kwargs, response_obj)

        def log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            calls.failed(kwargs)

        async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            calls.succeeded(kwargs, response_obj)

        async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            calls.failed(kwargs)

    litellm.callbacks.append(ArtPatchLogger())
