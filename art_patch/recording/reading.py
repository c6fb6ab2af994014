"""Exchange -> Call: the parsing that the app's threads are spared. Pure; runs in the background.

Only allow-listed request fields are kept. Nothing here can fail because of what a server sent: what cannot be read is
left out, and the call says in `untrainable` what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from art_patch.ids import new_id
from art_patch.recording.exchange import Exchange
from art_patch.recording.proof import why_untrainable
from art_patch.recording.scrubbing import scrub
from art_patch.recording.sse import StreamedAnswer, assemble, events
from art_patch.records import JSON, Call, CallStatus, Choice

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


@dataclass(frozen=True, slots=True)
class _Answer:
    body: JSON
    done: bool  # nothing of it can be missing
    error: Any


def read_call(exchange: Exchange) -> Call:
    """Return the call, without its trajectory (`trajectory_id` is empty)."""
    request = _json_object(exchange.request)
    params = {key: value for key, value in request.items() if key in PARAMS}
    if not exchange.keeps_logprobs and exchange.policy is not None:
        params.pop("logprobs", None)  # ours, not the app's
    answer = _read_answer(exchange)
    choices = tuple(_choice(position, item) for position, item in enumerate(_dicts(answer.body.get("choices"))))
    usage = _object(answer.body.get("usage"))
    sampled = sum(len(choice.token_ids or ()) for choice in choices)
    prompt_ids = _ints(answer.body.get("prompt_token_ids"))
    status = _status(exchange, answer, choices, params.get("n"))
    error = exchange.error
    if error is None and answer.error is not None:
        error = f"the server ended the stream: {_short(answer.error)}"
    call = Call(
        id=new_id(exchange.started_at),
        trajectory_id="",
        started_at=exchange.started_at,
        requested_model=exchange.requested_model,
        messages=tuple(_dicts(request.get("messages"))),
        choices=choices,
        tools=tuple(_dicts(request.get("tools"))),
        params=params,
        span_id=exchange.span_id,
        duration_ms=exchange.duration_ms,
        ttft_ms=exchange.ttft_ms,
        policy=exchange.policy,
        prompt_token_ids=prompt_ids,
        prompt_tokens=_count(usage.get("prompt_tokens"), len(prompt_ids or ())),
        completion_tokens=_count(usage.get("completion_tokens"), sampled),
        status=status,
        error=None if error is None else scrub(error),
        fallback=None if exchange.fallback is None else scrub(exchange.fallback),
    )
    return replace(call, untrainable=why_untrainable(call))


def _read_answer(exchange: Exchange) -> _Answer:
    raw = b"".join(exchange.answer)
    if raw and exchange.decode is not None:
        try:
            raw = exchange.decode(raw)
        except Exception:  # the app gave up in the middle of a compressed stream
            raw = b""
    if raw.lstrip()[:1] == b"{":
        return _Answer(_json_object(raw), True, None)
    answer: StreamedAnswer = assemble(events(raw))
    return _Answer(answer.body, answer.done, answer.error)


def _status(exchange: Exchange, answer: _Answer, choices: tuple[Choice, ...], n: Any) -> CallStatus:
    if exchange.ended == "failed" or answer.error is not None:
        return "error"
    if exchange.ended == "cancelled" and not (exchange.streamed and answer.done):
        return "cancelled"
    if exchange.ended == "complete" or answer.done:
        return "ok"
    # Many apps leave the loop at the finish reason, one event before the stream's own end: the answer is whole.
    expected = n if isinstance(n, int) else 1
    finished = [choice for choice in choices if choice.finish_reason is not None]
    return "ok" if len(finished) == len(choices) >= expected else "abandoned"


def _choice(position: int, item: dict[str, Any]) -> Choice:
    index = item.get("index")
    message = _object(item.get("message"))
    reason = item.get("finish_reason")
    return Choice(
        index=index if isinstance(index, int) else position,
        message=message,
        finish_reason=reason if isinstance(reason, str) else None,
        token_ids=_ints(item.get("token_ids")),
        logprobs=_logprobs(item.get("logprobs")),
    )


def _logprobs(value: Any) -> tuple[float, ...] | None:
    content = _object(value).get("content")
    if not isinstance(content, list):
        return None
    numbers = [_object(item).get("logprob") for item in cast(list[Any], content)]
    if not all(isinstance(number, int | float) for number in numbers):
        return None
    return tuple(float(cast(float, number)) for number in numbers)


def _ints(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(item, int) for item in cast(list[Any], value)):
        return None
    return tuple(cast(list[int], value))


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value >= 0 else default


def _object(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _dicts(value: Any) -> Iterable[dict[str, Any]]:
    items = cast(list[Any], value) if isinstance(value, list) else []
    return [_object(item) for item in items if isinstance(item, dict)]


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        return _object(json.loads(raw))
    except (ValueError, RecursionError):
        return {}


def _short(error: Any) -> str:
    message = _object(error).get("message")
    return message if isinstance(message, str) else json.dumps(error, default=repr)
