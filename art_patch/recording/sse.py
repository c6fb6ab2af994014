"""Server-sent events, and the chat answer that their chunks add up to.

`events()` takes the whole stream at once, so how the network cut it cannot matter. It follows the WHATWG rules that
matter here: LF, CRLF or CR end a line, a blank line ends an event, several `data:` lines join, comments are skipped.
An event that the stream was cut in is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from art_patch._lib.loose_json import as_text, parse_object

DONE = "[DONE]"

_LINE_END = re.compile(rb"\r\n|\n|\r")


def events(stream: bytes) -> Iterator[str]:
    """Yield the data of each complete event."""
    data: list[bytes] = []
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
    # SSE would drop an event that no blank line ends, but `[DONE]` is the end itself and some servers stop right there.
    if data == [DONE.encode()]:
        yield DONE


@dataclass(slots=True)
class StreamedAnswer:
    """What the chunks of a stream add up to, in the shape of a whole chat completion.

    Attributes:
        body: `choices` (with `message`), `usage`, `prompt_token_ids`, ... as far as they came.
        done: whether the stream said `[DONE]`.
        error: the error object that the server put into the stream.
    """

    body: dict[str, Any] = field(default_factory=dict[str, Any])
    done: bool = False
    error: Any = None


def assemble(chunks: Iterable[str]) -> StreamedAnswer:
    """Add up the data of the events of one chat completion; what is not JSON is skipped."""
    answer = StreamedAnswer()
    body = answer.body
    choices: dict[int, dict[str, Any]] = {}
    for data in chunks:
        if data.startswith(DONE):
            answer.done = True
            break
        chunk = parse_object(data)
        if chunk.get("error"):
            answer.error = chunk["error"]
        for key in ("model", "prompt_token_ids"):
            if key not in body and chunk.get(key) is not None:
                body[key] = chunk[key]
        usage = chunk.get("usage")
        if usage is not None and ("usage" not in body or isinstance(usage, dict)):
            body["usage"] = usage
        for part in _dicts(chunk.get("choices")):
            _add_part(choices, part)
    body["choices"] = [_finished(choices[index]) for index in sorted(choices)]
    return answer


def _dicts(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    return [cast(dict[str, Any], item) for item in cast(list[Any], value) if isinstance(item, dict)]


def _add_part(choices: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index")
    index = index if isinstance(index, int) else 0
    choice = choices.get(index)
    if choice is None:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        choice = choices[index] = {"index": index, "message": message, "pieces": {}, "calls": {}}
    if part.get("finish_reason") is not None:
        choice["finish_reason"] = part["finish_reason"]
    if isinstance(part.get("token_ids"), list):
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    logprobs = part.get("logprobs")
    if isinstance(logprobs, dict) and isinstance(cast(dict[str, Any], logprobs).get("content"), list):
        choice.setdefault("logprobs", {"content": []})["content"].extend(logprobs["content"])
    delta = part.get("delta")
    if not isinstance(delta, dict):
        return
    message, pieces = choice["message"], choice["pieces"]
    for key, value in cast(dict[str, Any], delta).items():
        if value is None or key == "role":
            continue
        if key == "tool_calls":
            for call in _dicts(value):
                _add_tool_call(choice["calls"], call)
        elif isinstance(value, str):
            # Joined at the end: a text that grows piece by piece is copied with each.
            pieces.setdefault(key, []).append(value)
            message[key] = ""
        else:
            pieces.pop(key, None)
            message[key] = value


def _add_tool_call(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index")
    position = index if isinstance(index, int) else len(calls)
    call = calls.setdefault(position, {"id": None, "type": "function", "function": {"name": [], "arguments": []}})
    call["id"] = part.get("id") or call["id"]
    call["type"] = part.get("type") or call["type"]
    function = part.get("function")
    if isinstance(function, dict):
        for key, pieces in call["function"].items():
            pieces.append(as_text(cast(dict[str, Any], function).get(key)))


def _finished(choice: dict[str, Any]) -> dict[str, Any]:
    calls, message = choice.pop("calls"), choice["message"]
    for key, pieces in choice.pop("pieces").items():
        message[key] = "".join(pieces)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        for call in message["tool_calls"]:
            call["function"] = {key: "".join(pieces) for key, pieces in call["function"].items()}
    return choice
