"""Rewrites the champion's chat answer into the Responses object, or the stream of events, that the app has asked for.

The SDK parses the JSON that is made here, so the app gets a genuine `Response`. The fields of the request that the API
repeats in its answer have the app's values. Ids are made here, and `model` is the name that the app used.
`system_fingerprint` names the policy, as for chat: the SDK keeps that field, although the API does not have it.

Each chunk of a stream is checked as for chat, and then becomes events of the Responses API. Reasoning becomes no event.
The first events are held back until the answer has content (see `says_something`). The final event holds the usage, so
it is sent when the engine's stream ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from art_patch._lib.faults import faults
from art_patch._lib.loose_json import objects
from art_patch.patching.rewriting import responses_items as items
from art_patch.patching.rewriting.engine_request import merged_body
from art_patch.patching.rewriting.response_rewriter import (
    InvalidAnswer,
    ResponseRewriter,
    StreamRewriter,
    dump,
    says_something,
)
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


def rewriter(options: Any, local: Any) -> ResponsesRewriter:
    """Return the rewriter for the answer to `local`, the request to the engine that was made from `options`."""
    given = merged_body(options)
    return ResponsesRewriter(
        policy=local.json_data["model"],
        requested_model=given["model"],
        n=1,
        keeps_logprobs=False,
        keeps_token_ids=False,
        request=given,
    )


@dataclass(frozen=True, slots=True)
class ResponsesRewriter(ResponseRewriter):
    """Checks an answer like `ResponseRewriter`, and returns a Responses object. `request` is the app's request body."""

    request: JSON

    def whole(self, body: bytes) -> bytes:
        """Return the body of the Responses object for an answer that was not streamed."""
        answer = self.checked(body)
        choice: dict[str, Any] = answer["choices"][0]
        why, response = items.why_incomplete(choice["finish_reason"]), self.begun(answer)
        items.finish(response, items.output(choice["message"], why), why, answer.get("usage"))
        return dump(response)

    def stream(self) -> StreamRewriter:
        """Return a rewriter that turns a streamed answer into the events of the Responses API."""
        return ResponsesStream(self)

    def begun(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return a Responses object without output yet. `answer`: the engine's answer, or the first chunk of it."""
        created = answer.get("created")
        repeated = {key: self.request.get(key) for key in _REPEATED}
        return {
            "id": items.new_item_id("resp"),
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
            **{key: _REPEATED[key] if value is None else value for key, value in repeated.items()},
        }


class _Message:
    """The message item that is being written: one part after the other, each a text or a refusal."""

    def __init__(self, index: int) -> None:
        self.id = items.new_item_id("msg")
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.kinds: list[str] = []
        self.pieces: list[list[str]] = []

    def texts(self) -> list[tuple[str, str]]:
        return [(kind, "".join(pieces)) for kind, pieces in zip(self.kinds, self.pieces, strict=True)]


class _Call:
    """A function-call item that is being written."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.id = items.new_item_id("fc")
        self.place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self.call_id = call_id
        self.name = name
        self.pieces: list[str] = []

    def item(self, status: str) -> JSON:
        return items.call_item(self.id, self.call_id, self.name, "".join(self.pieces), status)


def _part(kind: str, text: str) -> JSON:
    return items.text_part(text) if kind == "output_text" else items.refusal_part(text)


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "output_text" else {}


class ResponsesStream(StreamRewriter):
    """Turns the chunks of a chat answer into the events of a Responses stream."""

    def __init__(self, rewriter: ResponsesRewriter) -> None:
        super().__init__(rewriter)
        self._request = rewriter
        self._response: dict[str, Any] = {}
        self._number = 0
        self._items: list[_Message | _Call] = []
        self._message: _Message | None = None
        self._calls: dict[int, _Call] = {}
        self._closed = False
        self._why: str | None = None
        self._usage: Any = None
        self._over = False

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

    def _shows(self, delta: dict[str, Any]) -> bool:
        # Reasoning is waited through and not handed out: the app would send it back with its next call, which may go
        # upstream, and a provider refuses reasoning that is not its own. The record has it.
        return says_something(delta)

    def _between(self, line: bytes) -> bytes:
        return b""

    def _last(self, line: bytes) -> bytes:
        return self._terminal()

    def _error(self, line: bytes) -> bytes:
        return line.rstrip() + b"\n\n"

    def _chunk(self, chunk: dict[str, Any], line: bytes) -> bytes:
        return b"".join(self._events(chunk))

    def _events(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        if not self._response:
            self._response = self._request.begun(chunk)
            yield self._event("created", response=self._response)
            yield self._event("in_progress", response=self._response)
        self._usage = chunk.get("usage") or self._usage
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) != 0:
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict):
                yield from self._delta(cast(dict[str, Any], delta))
            if choice.get("finish_reason") is not None and not self._closed:
                self._closed, self._why = True, items.why_incomplete(choice["finish_reason"])
                # Items are closed only now: an item is never reopened, and engines may write several tool calls at
                # once.
                yield from self._close()

    def _delta(self, delta: dict[str, Any]) -> Iterable[bytes]:
        if self._closed:
            return
        for kind, text in (("output_text", delta.get("content")), ("refusal", delta.get("refusal"))):
            if isinstance(text, str) and text:
                yield from self._write(kind, text)
        for position, call in enumerate(objects(delta.get("tool_calls"))):
            yield from self._call(position, call)

    def _write(self, kind: str, text: str) -> Iterable[bytes]:
        message = self._message
        if message is None:
            message = self._message = _Message(len(self._items))
            yield from self._add(message, items.message_item(message.id, [], "in_progress"))
        place = message.place
        if not message.kinds or message.kinds[-1] != kind:
            message.kinds.append(kind)
            message.pieces.append([])
            place["content_index"] = len(message.kinds) - 1
            yield self._event("content_part.added", **place, part=_part(kind, ""))
        if text:
            message.pieces[-1].append(text)
            yield self._event(f"{kind}.delta", **place, delta=text, **_logprobs(kind))

    def _call(self, position: int, given: dict[str, Any]) -> Iterable[bytes]:
        index = given.get("index")
        index = index if isinstance(index, int) else position
        named: dict[str, Any] = given["function"] if isinstance(given.get("function"), dict) else {}
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
        for index, (item, status) in enumerate(
            zip(self._items, items.statuses(len(self._items), self._why), strict=True)
        ):
            if isinstance(item, _Call):
                shown = item.item(status)
                words = {"name": shown["name"], "arguments": shown["arguments"]}
                yield self._event("function_call_arguments.done", **item.place, **words)
            else:
                texts = item.texts()
                shown = items.message_item(item.id, [_part(*text) for text in texts], status)
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
        items.finish(self._response, self._response["output"], self._why, self._usage)
        return self._event(self._response["status"], response=self._response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response." + kind.encode() + b"\ndata: " + dump(event) + b"\n\n"
