"""Legacy completions: each prompt is a user message, each text an assistant message.

Not routed, so there are never exact tokens: a completion prompt is continued as it stands, and no chat template can
render messages to it.
"""

from __future__ import annotations

from typing import Any

from art_patch._lib.loose_json import as_count, as_list, as_object, as_text, objects, parse_object
from art_patch.recording.sse import DONE, events
from art_patch.recording.surfaces import Answered, Asked, is_whole
from art_patch.trajectories import PARAMS as CHAT_PARAMS
from art_patch.types import JSON, Choice

PARAMS = CHAT_PARAMS | {"best_of", "echo", "suffix"}
"""Request fields that are recorded."""


def asked(request: dict[str, Any]) -> Asked:
    """Read a request."""
    prompts, n = _prompts(request.get("prompt")), request.get("n")
    return Asked(
        messages=tuple(prompts),
        params={key: value for key, value in request.items() if key in PARAMS},
        answers=max(1, len(prompts)) * (n if isinstance(n, int) else 1),
    )


def _prompts(prompt: Any) -> list[JSON]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    items = as_list(prompt)
    if items and all(isinstance(item, int) for item in items):
        return [_from_ids(items)]
    return [{"role": "user", "content": item} if isinstance(item, str) else _from_ids(as_list(item)) for item in items]


def _from_ids(ids: list[Any]) -> JSON:
    # Nobody but the model's own tokenizer could say what they spell.
    return {"role": "user", "content": [{"type": "token_ids", "token_ids": ids}]}


def answered(raw: bytes) -> Answered:
    """Read an answer."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    model: str | None = None
    error: Any = None
    done = is_whole(raw)
    # A whole answer is a stream of one chunk: both hold choices with `text`.
    for data in [raw] if done else events(raw):
        if isinstance(data, str) and data.startswith(DONE):
            done = True
            break
        chunk = parse_object(data)
        error = chunk.get("error") or error
        usage = as_object(chunk.get("usage")) or usage
        model = as_text(chunk.get("model")) or model
        for position, choice in enumerate(objects(chunk.get("choices"))):
            index = choice.get("index")
            index = index if isinstance(index, int) else position
            texts.setdefault(index, []).append(as_text(choice.get("text")))
            if isinstance(choice.get("finish_reason"), str):
                reasons[index] = choice["finish_reason"]
    return Answered(
        choices=tuple(
            Choice(index, {"role": "assistant", "content": "".join(texts[index])}, reasons.get(index))
            for index in sorted(texts)
        ),
        done=done,
        error=error,
        model=model,
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
    )
