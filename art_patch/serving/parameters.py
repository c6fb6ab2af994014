"""Which parameters of a chat completion every engine of ours refuses or may leave aside, and how it says so. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from art_patch.serving.http_errors import ApiError

# They say who calls, not what to answer.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# Honoured only where they ask for nothing; every value listed is the parameter's neutral one.
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
    """Passes if every field is understood, has no effect on the answer, or asks for nothing.

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


def short(value: object) -> str:
    """Returns a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
