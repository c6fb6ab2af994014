"""Reads requests and answers of chat completions and legacy completions, and the server-sent events of all surfaces.

Requests and answers of every API (chat, completions, Responses) become an `Asked` and an `Answered`, with the messages
of chat completions. The functions are pure. They never raise because of the text that an app or a server sent: a part
that cannot be read is left out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from art_patch._lib.loose_json import as_count, as_ids, as_list, as_object, as_text, objects, parse_object
from art_patch.trajectories import PARAMS
from art_patch.types import JSON, Choice


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that has been parsed."""

    messages: tuple[JSON, ...] = ()
    tools: tuple[JSON, ...] = ()
    params: dict[str, Any] = field(default_factory=dict[str, Any])  # allow-listed; no other field is stored
    answers: int = 1  # choices of a complete answer to the request, such as its `n`


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that has been parsed, as far as it was received: it may have been a stream, and may have been cut."""

    choices: tuple[Choice, ...] = ()
    done: bool = True  # false for a stream without its end marker
    error: Any = None  # the error object that the server sent in the middle of a stream
    model: str | None = None  # as the server names it
    fingerprint: str | None = None  # `system_fingerprint`: the server's settings, which some providers name
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None  # as `usage` counts them
    completion_tokens: int | None = None


def is_whole(raw: bytes) -> bool:
    """Return whether an answer's bytes are one JSON object; false for a stream of server-sent events."""
    return raw.lstrip()[:1] == b"{"


DONE = "[DONE]"

_LINE_END = re.compile(rb"\r\n|\n|\r")


def events(stream: bytes) -> Iterator[str]:
    """Yield the data of each complete server-sent event of a stream, by the rules of the WHATWG HTML standard."""
    data: list[bytes] = []
    # The whole stream at once, so how the network cut it cannot matter. A byte-order mark may stand in front.
    stream = stream.removeprefix(b"\xef\xbb\xbf")
    # The pattern takes ten times as long, and only a stream with CR needs it.
    lines = _LINE_END.split(stream) if b"\r" in stream else stream.split(b"\n")
    for line in lines[:-1]:
        if not line:
            if data:
                yield (data[0] if len(data) == 1 else b"\n".join(data)).decode("utf-8", "replace")
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line == b"data":
            data.append(b"")
    # By the rules, an event without a blank line after it is dropped. But `[DONE]` is the end itself, and some servers
    # stop right after it.
    if data == [DONE.encode()]:
        yield DONE


class StreamedAnswer(NamedTuple):
    """A streamed chat completion, joined into one that looks as if it had not been streamed.

    `body` has `choices` (with `message`), `usage`, `prompt_token_ids`, `model` and `system_fingerprint`, as far as they
    were received; `done` tells whether the server sent `[DONE]`, and `error` is the error object that it sent.
    """

    body: dict[str, Any]
    done: bool
    error: Any


def assemble(chunks: Iterable[str]) -> StreamedAnswer:
    """Join the chunks of one chat completion. A chunk that is not JSON is skipped."""
    body: dict[str, Any] = {}
    done, error = False, None
    choices: dict[int, dict[str, Any]] = {}
    for data in chunks:
        if data.startswith(DONE):
            done = True
            break
        chunk = parse_object(data)
        error = chunk.get("error") or error
        for key in ("model", "system_fingerprint", "prompt_token_ids"):
            # Azure's first chunk has the model "".
            if key not in body and chunk.get(key) not in (None, ""):
                body[key] = chunk[key]
        usage = chunk.get("usage")
        # Some servers send `usage: null` with each chunk, after the real one too.
        if usage is not None and ("usage" not in body or isinstance(usage, dict)):
            body["usage"] = usage
        for part in objects(chunk.get("choices")):
            _add_part(choices, part)
    body["choices"] = [_finished(choices[index]) for index in sorted(choices)]
    return StreamedAnswer(body, done, error)


def _index(item: dict[str, Any], default: int) -> int:
    index = item.get("index")
    return index if isinstance(index, int) else default


def _add_part(choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = _index(part, 0)
    choice = choices.get(index)
    if choice is None:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        choice = choices[index] = {"index": index, "message": message, "pieces": {}, "calls": {}}
    if part.get("finish_reason") is not None:
        choice["finish_reason"] = part["finish_reason"]
    if isinstance(part.get("token_ids"), list):
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    logprobs = as_object(part.get("logprobs")).get("content")
    if isinstance(logprobs, list):
        choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs)
    message, pieces = choice["message"], choice["pieces"]
    for key, value in as_object(part.get("delta")).items():
        if value is None or key == "role":
            continue
        if key == "tool_calls":
            for call in objects(value):
                _add_tool_call(choice["calls"], call)
        elif isinstance(value, str):
            # Joined at the end: a text that grows piece by piece would be copied with each piece.
            pieces.setdefault(key, []).append(value)
            message[key] = ""
        else:
            pieces.pop(key, None)
            message[key] = value


def _add_tool_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    position = _index(part, len(calls))  # some servers leave the index out and send each call whole
    call = calls.setdefault(position, {"id": None, "type": "function", "function": {"name": [], "arguments": []}})
    call["id"] = part.get("id") or call["id"]
    call["type"] = part.get("type") or call["type"]
    function = part.get("function")
    if isinstance(function, dict):
        for key, pieces in call["function"].items():
            pieces.append(as_text(cast("dict[str, Any]", function).get(key)))


def _finished(choice: dict[str, Any]) -> dict[str, Any]:
    calls, message = choice.pop("calls"), choice["message"]
    for key, pieces in choice.pop("pieces").items():
        message[key] = "".join(pieces)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        for call in message["tool_calls"]:
            call["function"] = {key: "".join(pieces) for key, pieces in call["function"].items()}
    return choice


def read_chat_request(request: dict[str, Any]) -> Asked:
    """Return the parsed request of a chat completion."""
    n = request.get("n")
    return Asked(
        messages=tuple(objects(request.get("messages"))),
        tools=tuple(objects(request.get("tools"))),
        params={key: value for key, value in request.items() if key in PARAMS},
        answers=n if isinstance(n, int) else 1,
    )


def read_chat_answer(raw: bytes) -> Answered:
    """Return the parsed answer of a chat completion, from one JSON object or a stream of events."""
    body, done, error = (parse_object(raw), True, None) if is_whole(raw) else assemble(events(raw))
    usage = as_object(body.get("usage"))
    return Answered(
        choices=tuple(_choice(position, item) for position, item in enumerate(objects(body.get("choices")))),
        done=done,
        error=error,
        model=as_text(body.get("model")) or None,
        fingerprint=as_text(body.get("system_fingerprint")) or None,
        prompt_token_ids=as_ids(body.get("prompt_token_ids")),
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
    )


def _choice(position: int, item: dict[str, Any]) -> Choice:
    reason = item.get("finish_reason")
    return Choice(
        index=_index(item, position),
        message=as_object(item.get("message")),
        finish_reason=reason if isinstance(reason, str) else None,
        token_ids=as_ids(item.get("token_ids")),
        logprobs=_logprobs(item.get("logprobs")),
    )


def _logprobs(value: Any) -> tuple[float, ...] | None:
    content = as_object(value).get("content")
    numbers = [as_object(item).get("logprob") for item in as_list(content)]
    if not isinstance(content, list) or not all(isinstance(number, int | float) for number in numbers):
        return None
    return tuple(float(cast("float", number)) for number in numbers)


_COMPLETIONS_PARAMS = PARAMS | {"best_of", "echo", "suffix"}


def read_completions_request(request: dict[str, Any]) -> Asked:
    """Return the parsed request of a legacy completion. Each prompt becomes a user message."""
    prompts, n = _prompts(request.get("prompt")), request.get("n")
    return Asked(
        messages=tuple(prompts),
        params={key: value for key, value in request.items() if key in _COMPLETIONS_PARAMS},
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
    # Only the tokenizer of the model knows which text these ids spell.
    return {"role": "user", "content": [{"type": "token_ids", "token_ids": ids}]}


def read_completions_answer(raw: bytes) -> Answered:
    """Return the parsed answer of a legacy completion. Each text becomes an assistant message."""
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    usage: dict[str, Any] = {}
    model: str | None = None
    fingerprint: str | None = None
    error: Any = None
    done = is_whole(raw)
    # A whole answer is read like a stream of one chunk: both hold choices with `text`.
    for data in [raw] if done else events(raw):
        if isinstance(data, str) and data.startswith(DONE):
            done = True
            break
        chunk = parse_object(data)
        error = chunk.get("error") or error
        usage = as_object(chunk.get("usage")) or usage
        model = as_text(chunk.get("model")) or model
        fingerprint = as_text(chunk.get("system_fingerprint")) or fingerprint
        for position, choice in enumerate(objects(chunk.get("choices"))):
            index = _index(choice, position)
            texts.setdefault(index, []).append(as_text(choice.get("text")))
            if isinstance(choice.get("finish_reason"), str):
                reasons[index] = choice["finish_reason"]
    said = {index: {"role": "assistant", "content": "".join(texts[index])} for index in sorted(texts)}
    return Answered(
        choices=tuple(Choice(index, message, reasons.get(index)) for index, message in said.items()),
        done=done,
        error=error,
        model=model,
        fingerprint=fingerprint,
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
    )
