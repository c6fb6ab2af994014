"""Rewrites the champion's chat answer into the Responses object, or the stream of events, that the app has asked for.

The SDK parses the JSON that is made here, so the app gets a genuine `Response`. The fields of the request that the API
repeats in its answer have the app's values. Ids are made here, and `model` is the name that the app used.
`system_fingerprint` names the policy, as for chat: the SDK keeps that field, although the API does not have it.

Each chunk of a stream is checked as for chat, and then becomes events of the Responses API. Reasoning becomes no event.
The first events are held back until the answer has content (see `says_something`). The final event holds the usage, so
it is sent when the engine's stream ends.
"""

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from art_patch._lib.faults import faults
from art_patch._lib.loose_json import as_count, as_object, objects
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, ResponseRewriter, StreamRewriter, dump
from art_patch.types import JSON

# Fields of a request that its response repeats, with the value that the API gives where the app gave none.
_REPEATED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


@dataclass(frozen=True, slots=True)
class ResponsesRewriter(ResponseRewriter):
    """Checks an answer like `ResponseRewriter`, and returns a Responses object. `request` is the app's request body."""

    request: JSON

    def whole(self, body: bytes) -> bytes:
        """Return the body of the Responses object for an answer that was not streamed."""
        answer = self.checked(body)
        choice: dict[str, Any] = answer["choices"][0]
        why, response = _why_incomplete(choice["finish_reason"]), self.begun(answer)
        _finish(response, _output(choice["message"], why), why, answer.get("usage"))
        return dump(response)

    def stream(self) -> StreamRewriter:
        """Return a rewriter that turns a streamed answer into the events of the Responses API."""
        return ResponsesStream(self)

    def begun(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Responses object without output yet. `answer`: the engine's answer, or the first chunk of it."""
        created = answer.get("created")
        given = {key: value for key in _REPEATED if (value := self.request.get(key)) is not None}
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": created if isinstance(created, int) else int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": self.requested_model,
            "output": [],
            "store": False,
            "system_fingerprint": self.policy,
            "usage": None,
            **_REPEATED,
            **given,
        }


# Finish reason of chat -> why the response is incomplete; `None` if it is complete.
_WHY_INCOMPLETE = {
    "stop": None,
    "tool_calls": None,
    "function_call": None,
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}


def _why_incomplete(reason: Any) -> str | None:
    if not isinstance(reason, str) or reason not in _WHY_INCOMPLETE:
        raise InvalidAnswer("it ended for a reason that we do not know")
    return _WHY_INCOMPLETE[reason]


def _finish(response: dict[str, Any], output: list[JSON], why: str | None, usage: Any) -> None:
    """Set output items, status and usage of a response. `usage` is that of the chat answer."""
    response["status"] = "completed" if why is None else "incomplete"
    response["incomplete_details"] = None if why is None else {"reason": why}
    response["output"] = output
    response["usage"] = _usage(as_object(usage))


def _usage(usage: dict[str, Any]) -> JSON:
    def count(given: Any, key: str) -> int:
        return as_count(as_object(given).get(key)) or 0

    read, written = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
    cached = count(usage.get("prompt_tokens_details"), "cached_tokens")
    thought = count(usage.get("completion_tokens_details"), "reasoning_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": read + written,
    }


def _statuses(count: int, why: str | None) -> list[str]:
    """Return the status of each of `count` items: all complete, except the final one if `why` is given."""
    return ["completed"] * (count - 1) + ["completed" if why is None else "incomplete"]


def _output(message: Mapping[str, Any], why: str | None) -> list[JSON]:
    """Return the output items (message, function calls) for an assistant message of chat."""
    content, refusal, calls = message.get("content"), message.get("refusal"), message.get("tool_calls") or []
    if not isinstance(content, str | None) or not isinstance(refusal, str | None) or not isinstance(calls, list):
        raise InvalidAnswer("its message is of another kind than we know")
    parts: list[JSON] = []
    if content or not (refusal or calls):  # an answer without a word is a message all the same
        parts.append(_part("output_text", content or ""))
    if refusal:
        parts.append(_part("refusal", refusal))
    found = [call_of(as_object(call)) for call in cast("list[Any]", calls)]
    status = iter(_statuses(bool(parts) + len(found), why))
    items = [_message_item(new_id("msg"), parts, next(status))] if parts else []
    return items + [_call_item(new_id("fc"), *call, next(status)) for call in found]


def call_of(call: dict[str, Any]) -> tuple[str, str, str]:
    """Return id, name and arguments of a tool call."""
    function = as_object(call.get("function"))
    call_id, name, arguments = call.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidAnswer("a tool call is of another kind than we know")
    return call_id, name, arguments


def new_id(kind: str) -> str:
    """Return a new id for an item. Its prefix shows the kind: the API checks it when a client sends the item back."""
    return f"{kind}_{uuid.uuid4().hex}"


def _part(kind: str, text: str) -> JSON:
    known: JSON = {"annotations": [], "logprobs": [], "text": text} if kind == "output_text" else {"refusal": text}
    return {"type": kind, **known}


def _message_item(item_id: str, parts: list[JSON], status: str) -> JSON:
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": parts}


def _call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> JSON:
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **call}


class _Message:
    """The message item that is being written: one part after the other, each a text or a refusal."""

    def __init__(self, index: int) -> None:
        self.id = new_id("msg")
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.parts: list[tuple[str, list[str]]] = []  # kind and pieces of each

    def texts(self) -> list[tuple[str, str]]:
        return [(kind, "".join(pieces)) for kind, pieces in self.parts]


class _Call:
    """A function-call item that is being written."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.id = new_id("fc")
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.call_id = call_id
        self.name = name
        self.pieces: list[str] = []

    def item(self, status: str) -> JSON:
        return _call_item(self.id, self.call_id, self.name, "".join(self.pieces), status)


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "output_text" else {}


class TranslatedStream(StreamRewriter):
    """Checks the chunks of a chat answer, and turns them into the events of another API."""

    # Reasoning is waited through and not handed out: the app would send it back with its next call, which may go
    # upstream, and a provider refuses reasoning that is not its own. The record has it.
    shows_reasoning = False

    def end(self) -> bytes:
        """Return the final events when the engine's stream has ended."""
        return super().end() + self._terminal()

    def _line(self, line: bytes) -> bytes:
        try:
            return super()._line(line)
        except InvalidAnswer:
            raise
        except Exception as error:
            # Chat hands out the engine's own bytes after a fault. Here they would be of another API.
            faults.fault("patching.responses", error)
            raise InvalidAnswer("it cannot be translated") from error

    # What chunks turn into.

    def _between(self, line: bytes) -> bytes:
        return b""

    def _last(self, line: bytes) -> bytes:
        return self._terminal()

    def _chunk(self, chunk: dict[str, Any], line: bytes) -> bytes:
        return b"".join(self._events(chunk))

    @abstractmethod
    def _events(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        """Yield the events for a chunk."""

    @abstractmethod
    def _terminal(self) -> bytes:
        """Return the final events, once."""


class ResponsesStream(TranslatedStream):
    """Turns the chunks of a chat answer into the events of a Responses stream."""

    def __init__(self, rewriter: ResponsesRewriter) -> None:
        super().__init__(rewriter)
        self._request = rewriter
        self._response: dict[str, Any] = {}
        self._number = 0
        self._items: list[_Message | _Call] = []
        self._message: _Message | None = None
        self._calls: dict[int, _Call] = {}
        self._why: str | None = None
        self._usage: Any = None
        self._closed = self._over = False

    def _error(self, line: bytes) -> bytes:
        return line.rstrip() + b"\n\n"

    def _events(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        if not self._response:
            self._response = self._request.begun(chunk)
            yield self._event("created", response=self._response)
            yield self._event("in_progress", response=self._response)
        self._usage = chunk.get("usage") or self._usage
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            if not self._closed:
                yield from self._delta(as_object(choice.get("delta")))
            if choice.get("finish_reason") is not None and not self._closed:
                self._closed, self._why = True, _why_incomplete(choice["finish_reason"])
                # Only now, because an item is never reopened, and engines may write several calls at once.
                yield from self._close()

    def _delta(self, delta: dict[str, Any]) -> Iterable[bytes]:
        for kind, text in (("output_text", delta.get("content")), ("refusal", delta.get("refusal"))):
            if isinstance(text, str) and text:
                yield from self._write(kind, text)
        for position, call in enumerate(objects(delta.get("tool_calls"))):
            yield from self._call(position, call)

    def _write(self, kind: str, text: str) -> Iterable[bytes]:
        message = self._message
        if message is None:
            message = self._message = _Message(len(self._items))
            yield from self._add(message, _message_item(message.id, [], "in_progress"))
        place = message.place
        if not message.parts or message.parts[-1][0] != kind:
            place["content_index"] = len(message.parts)
            message.parts.append((kind, []))
            yield self._event("content_part.added", **place, part=_part(kind, ""))
        if text:
            message.parts[-1][1].append(text)
            yield self._event(f"{kind}.delta", **place, delta=text, **_logprobs(kind))

    def _call(self, position: int, given: dict[str, Any]) -> Iterable[bytes]:
        index = given["index"] if isinstance(given.get("index"), int) else position
        named = as_object(given.get("function"))
        call = self._calls.get(index)
        if call is None:
            call_id, name = given.get("id"), named.get("name")
            if not isinstance(call_id, str) or not isinstance(name, str):
                raise InvalidAnswer("a tool call begins without id or name")
            call = self._calls[index] = _Call(len(self._items), call_id, name)
            yield from self._add(call, call.item("in_progress"))
        piece = named.get("arguments")
        if isinstance(piece, str) and piece:
            call.pieces.append(piece)
            yield self._event("function_call_arguments.delta", **call.place, delta=piece)

    def _add(self, item: _Message | _Call, shown: JSON) -> Iterable[bytes]:
        self._items.append(item)
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self) -> Iterable[bytes]:
        if not self._items:
            yield from self._write("output_text", "")  # an empty answer is a message all the same
        done: list[JSON] = []
        statuses = _statuses(len(self._items), self._why)
        for index, (item, status) in enumerate(zip(self._items, statuses, strict=True)):
            if isinstance(item, _Call):
                shown = item.item(status)
                words = {"name": shown["name"], "arguments": shown["arguments"]}
                yield self._event("function_call_arguments.done", **item.place, **words)
            else:
                texts = item.texts()
                shown = _message_item(item.id, [_part(*text) for text in texts], status)
                for number, (kind, text) in enumerate(texts):
                    place = {**item.place, "content_index": number}
                    whole = {"text" if kind == "output_text" else "refusal": text}
                    yield self._event(f"{kind}.done", **place, **whole, **_logprobs(kind))
                    yield self._event("content_part.done", **place, part=_part(kind, text))
            done.append(shown)
            yield self._event("output_item.done", output_index=index, item=shown)
        self._response["output"] = done

    def _terminal(self) -> bytes:
        if self._over:
            return b""
        if not self._closed:
            raise InvalidAnswer("the stream ended without a finish reason")
        self._over = True
        _finish(self._response, self._response["output"], self._why, self._usage)
        return self._event(self._response["status"], response=self._response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response." + kind.encode() + b"\ndata: " + dump(event) + b"\n\n"
