"""What a chat completion for vLLM may say. Pure.

vLLM ignores fields it does not know, so an answer could differ from what was asked for without a word. What it does not
honour is refused here; the caller's patch then asks the provider. So is what asks for the prompt's log-probabilities
(`prompt_logprobs`, `echo`): with a LoRA in the batch, vLLM 0.32 ends over it, and everybody's answers with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from art_patch.serving.http_errors import ApiError
from art_patch.serving.parameters import refuse_unsupported

_UNDERSTOOD = frozenset(
    {
        "add_generation_prompt", "allowed_token_ids", "bad_words", "chat_template_kwargs", "continue_final_message",
        "frequency_penalty", "ignore_eos", "include_reasoning", "include_stop_str_in_output", "logit_bias",
        "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p", "min_tokens", "model", "n",
        "parallel_tool_calls", "presence_penalty", "priority", "reasoning_effort",
        "repetition_penalty", "response_format", "return_token_ids", "seed", "skip_special_tokens",
        "spaces_between_special_tokens", "stop", "stop_token_ids", "stream", "stream_options", "structured_outputs",
        "temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncate_prompt_tokens",
    }
)  # fmt: skip


def check_request(fields: Mapping[str, Any]) -> str:
    """Returns the policy that is asked.

    Raises:
        ApiError: 400, naming the parameter.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    refuse_unsupported(given, _UNDERSTOOD)
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model must be a string", param="model")
    if not isinstance(given.get("messages"), list) or not given["messages"]:
        raise ApiError(400, "messages must be a list that is not empty", param="messages")
    return model


def conversation_of(fields: Mapping[str, Any]) -> bytes:
    """Returns what every call of a conversation begins with: its messages up to the first that is not the user's."""
    opening: list[Any] = []
    for message in cast("list[Any]", fields["messages"]):
        role: Any = cast("dict[str, Any]", message).get("role") if isinstance(message, dict) else None
        if role not in ("system", "developer", "user"):
            break
        opening.append(message)
    return json.dumps(opening).encode()
