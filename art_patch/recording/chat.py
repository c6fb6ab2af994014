"""Chat completions: the surface whose words all records are in."""

from __future__ import annotations

from typing import Any, cast

from art_patch.recording.loose_json import as_count, as_ids, as_object, objects, parse_object
from art_patch.recording.sse import assemble, events
from art_patch.recording.surfaces import Answered, Asked, is_whole
from art_patch.records import Choice

ENGINE_PARAMS = frozenset(
    {
        "allowed_token_ids", "bad_words", "chat_template_kwargs", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "min_p", "min_tokens",
        "repetition_penalty", "skip_special_tokens", "stop_token_ids", "structured_outputs", "top_k",
        "truncate_prompt_tokens",
    }
)  # fmt: skip
"""Request fields that only engines such as vLLM know; the SDK sends them through `extra_body`."""

PARAMS = ENGINE_PARAMS | frozenset(
    {
        "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "modalities", "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort",
        "response_format", "seed", "stop", "temperature", "tool_choice", "top_logprobs", "top_p", "verbosity",
    }
)  # fmt: skip
"""Request fields that are recorded. What is not named here never reaches the store."""


def asked(request: dict[str, Any]) -> Asked:
    """Read a request."""
    n = request.get("n")
    return Asked(
        messages=tuple(objects(request.get("messages"))),
        tools=tuple(objects(request.get("tools"))),
        params={key: value for key, value in request.items() if key in PARAMS},
        answers=n if isinstance(n, int) else 1,
    )


def answered(raw: bytes) -> Answered:
    """Read an answer."""
    if is_whole(raw):
        body, done, error = parse_object(raw), True, None
    else:
        streamed = assemble(events(raw))
        body, done, error = streamed.body, streamed.done, streamed.error
    usage, model = as_object(body.get("usage")), body.get("model")
    return Answered(
        choices=tuple(_choice(position, item) for position, item in enumerate(objects(body.get("choices")))),
        done=done,
        error=error,
        model=model if isinstance(model, str) else None,
        prompt_token_ids=as_ids(body.get("prompt_token_ids")),
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
    )


def _choice(position: int, item: dict[str, Any]) -> Choice:
    index = item.get("index")
    reason = item.get("finish_reason")
    return Choice(
        index=index if isinstance(index, int) else position,
        message=as_object(item.get("message")),
        finish_reason=reason if isinstance(reason, str) else None,
        token_ids=as_ids(item.get("token_ids")),
        logprobs=_logprobs(item.get("logprobs")),
    )


def _logprobs(value: Any) -> tuple[float, ...] | None:
    content = as_object(value).get("content")
    if not isinstance(content, list):
        return None
    numbers = [as_object(item).get("logprob") for item in cast(list[Any], content)]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    return tuple(float(cast(float, number)) for number in numbers)
