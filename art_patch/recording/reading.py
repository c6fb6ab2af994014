"""Exchange -> Call: the parsing that the app's threads are spared. Pure; runs in the background.

What the bytes mean is the surface's affair (`chat`, `completions`, `responses`); a policy is always asked in the words
of chat, whichever surface the app called. Nothing here can fail because of what a server sent: what cannot be read is
left out, and the call says in `untrainable` what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from art_patch._lib.ids import new_id
from art_patch._lib.loose_json import as_object, parse_object
from art_patch.recording import chat, completions, responses
from art_patch.recording.exchange import Exchange
from art_patch.recording.media import UNTRAINABLE as MEDIA
from art_patch.recording.media import without_media
from art_patch.recording.scrubbing import scrub
from art_patch.recording.surfaces import Answered, Asked
from art_patch.trajectories import why_untrainable
from art_patch.types import UPSTREAM, Api, Call, CallStatus

_READERS: dict[Api, tuple[Callable[[dict[str, Any]], Asked], Callable[[bytes], Answered]]] = {
    "chat": (chat.asked, chat.answered),
    "completions": (completions.asked, completions.answered),
    "responses": (responses.read_asked, responses.answered),
}


def read_call(exchange: Exchange) -> Call:
    """Return the call, without its trajectory (`trajectory_id` is empty)."""
    read_request, read_answer = _READERS["chat" if exchange.policy is not UPSTREAM else exchange.api]
    request = without_media(exchange.request)
    asked = read_request(parse_object(request))
    params = asked.params
    if not exchange.keeps_logprobs and exchange.policy is not UPSTREAM:
        params = {key: value for key, value in params.items() if key != "logprobs"}  # ours, not the app's
    answer = read_answer(without_media(_raw_answer(exchange)))
    error = exchange.error
    if error is None and answer.error is not None:
        error = f"the server ended the answer: {_short(answer.error)}"
    sampled = sum(len(choice.token_ids or ()) for choice in answer.choices)
    call = Call(
        id=new_id(exchange.started_at),
        trajectory_id="",
        started_at=exchange.started_at,
        requested_model=exchange.requested_model or answer.model or "",
        messages=asked.messages,
        choices=answer.choices,
        tools=asked.tools,
        params=params,
        span_id=exchange.span_id,
        duration_ms=exchange.duration_ms,
        ttft_ms=exchange.ttft_ms,
        policy=exchange.policy,
        prompt_token_ids=answer.prompt_token_ids,
        prompt_tokens=_known(answer.prompt_tokens, len(answer.prompt_token_ids or ())),
        completion_tokens=_known(answer.completion_tokens, sampled),
        status=_status(exchange, answer, asked.answers),
        error=None if error is None else scrub(error),
        fallback=None if exchange.fallback is None else scrub(exchange.fallback),
        api=exchange.api,
    )
    return replace(call, untrainable=why_untrainable(call) or (MEDIA if request is not exchange.request else None))


def _raw_answer(exchange: Exchange) -> bytes:
    raw = b"".join(exchange.answer)
    if raw and exchange.decode is not None:
        try:
            raw = exchange.decode(raw)
        except Exception:  # the app gave up in the middle of a compressed stream
            return b""
    return raw


def _status(exchange: Exchange, answer: Answered, expected: int) -> CallStatus:
    if exchange.ended == "failed" or answer.error is not None:
        return "error"
    if exchange.ended == "cancelled" and not (exchange.streamed and answer.done):
        return "cancelled"
    if exchange.ended == "complete" or answer.done:
        return "ok"
    # Many apps leave the loop at the finish reason, one event before the stream's own end: the answer is whole.
    finished = [choice for choice in answer.choices if choice.finish_reason is not None]
    return "ok" if len(finished) == len(answer.choices) >= expected else "abandoned"


def _known(count: int | None, default: int) -> int:
    return default if count is None else count


def _short(error: Any) -> str:
    message = as_object(error).get("message")
    return message if isinstance(message, str) else json.dumps(error, default=repr)
