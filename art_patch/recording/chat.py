"""Chat completions: the surface whose words all records are in."""

from __future__ import annotations

from typing import Any, cast

from art_patch._lib.loose_json import as_count, as_ids, as_object, objects, parse_object
from art_patch.recording.sse import assemble, events
from art_patch.recording.surfaces import Answered, Asked, is_whole
from art_patch.trajectories import PARAMS
from art_patch.types import Choice


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
