"""Refusals that both engines share: errors in OpenAI's shape, unsupported parameters, bodies that are too large.

Every error is `{"error": {"message", "type", "param", "code"}}`. A parameter passes if the engine understands it, if it
has no effect on the answer, or if it has its neutral value. Any other one is refused with 400: callers then ask their
provider, and a parameter that was silently ignored would give them a different answer than they asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from starlette.types import Receive

from art_patch.serving.contract import MAX_BODY_BYTES

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class ApiError(Exception):
    """A refusal that is sent to the caller as it is."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The response body."""
        return error_body(self.status, str(self), param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Formats an error."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# They identify the caller and leave the answer as it is.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# Accepted with these values only, because with them the parameter changes nothing. SDKs and agent frameworks send many
# of these on every call without being asked to.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "functions": ([],),
    "stop_token_ids": ([],),
    "include_reasoning": (True,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def refuse_unsupported(fields: Mapping[str, Any], understood: Collection[str]) -> None:
    """Return if every field is understood, has no effect on the answer, or has its neutral value.

    Raises:
        ApiError: 400, naming the parameter.
    """
    for key, value in fields.items():
        if key in understood or key in _WITHOUT_EFFECT:
            continue
        if not any(value == neutral for neutral in _NEUTRAL.get(key, ())):
            raise ApiError(
                400, f"{key} = {short(value)} is not supported by this engine; leave it out", param=key,
                code="unsupported_parameter",
            )  # fmt: skip


async def read_body(receive: Receive) -> bytes | None:
    """Return a request's whole body, `None` if the caller goes away before it is complete.

    Raises:
        ApiError: 413, it is larger than `MAX_BODY_BYTES`.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        # Counted while it comes: a body without a Content-Length could otherwise fill the memory.
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def short(value: object) -> str:
    """Returns a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
