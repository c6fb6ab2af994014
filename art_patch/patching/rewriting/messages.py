"""Routes calls of Anthropic's Messages API: says which a chat completion can express, and rewrites the answer to them.

`recording` reads a call as a Responses request, so the allow-list of `responses_request` decides: a call with a field
or block that is unknown there goes upstream unchanged. The answer has Anthropic's format, streamed or not; ids are made
here, `model` is the name that the app used, and `system_fingerprint` names the policy.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from art_patch._lib.loose_json import as_count, as_object, as_text, objects
from art_patch.patching.rewriting.engine_request import merged_body, why_not_carried
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer, ResponseRewriter, StreamRewriter, dump
from art_patch.patching.rewriting.responses_request import why_no_chat
from art_patch.patching.rewriting.responses_rewriter import TranslatedStream, call_of, new_id
from art_patch.recording import as_responses_request, read_messages_request
from art_patch.settings import Settings

# How `surfaces.Translated` reads a request body of this API.
read_request = read_messages_request


def rewriter(options: Any, local: Any) -> ResponseRewriter:
    """Return the rewriter for the answer to `local`, the request to the engine that was made from `options`."""
    return MessagesRewriter(local.json_data["model"], options.json_data["model"], 1, False, False)


def why_not_routed(options: Any, stream: bool, settings: Settings) -> str | None:
    """Return the reason why the champion cannot answer this Messages call; `None` if it can."""
    body = merged_body(options)
    if as_object((objects(body.get("messages")) or [{}])[-1]).get("role") == "assistant":
        return "the app begins the answer"
    given = {name: value for name, value in body.items() if value != {"type": "disabled"}}  # `thinking`
    return why_not_carried(options, body, stream) or why_no_chat(as_responses_request(given))


class MessagesRewriter(ResponseRewriter):
    """Checks an answer like `ResponseRewriter`, and returns a message of Anthropic's API."""

    def whole(self, body: bytes) -> bytes:
        """Return the body of the message for an answer that was not streamed."""
        answer = self.checked(body)
        choice: dict[str, Any] = answer["choices"][0]
        said: dict[str, Any] = choice["message"]
        text = as_text(said.get("content")) + as_text(said.get("refusal"))
        blocks = [_text(text)] if text else []
        for call in objects(said.get("tool_calls")):
            call_id, name, arguments = call_of(call)
            try:
                given = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise InvalidAnswer("the arguments of a tool call are no JSON") from None
            blocks.append(_tool_use(call_id, name, given))
        usage = _usage(answer)
        return dump(self.begun(usage) | _end(choice, called=len(blocks) > bool(text)) | {"content": blocks})

    def stream(self) -> StreamRewriter:
        """Return a rewriter that turns a streamed answer into the events of the Messages API."""
        return MessagesStream(self)

    def begun(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return a message without content yet."""
        known = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": self.requested_model}
        return {**known, "content": [], **_NO_END, "usage": usage, "system_fingerprint": self.policy}


_NO_END = {"stop_reason": None, "stop_sequence": None}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _tool_use(call_id: str, name: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _usage(answer: Mapping[str, Any]) -> dict[str, int]:
    """Return the usage of an answer, or of a chunk: the first one has no usage, but the ids of the prompt."""
    usage = as_object(answer.get("usage"))
    read = as_count(usage.get("prompt_tokens")) or len(answer.get("prompt_token_ids") or ())
    return {"input_tokens": read, "output_tokens": as_count(usage.get("completion_tokens")) or 0}


_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use", "content_filter": "refusal"}


def _end(choice: Mapping[str, Any], *, called: bool) -> dict[str, Any]:
    """Return the stop reason of a choice that has ended, and the stop sequence that ended it."""
    reason, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if reason == "stop" and isinstance(stop, str) and not called:  # a number is the id of a token that ends all answers
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    named = ("tool_use" if called else "end_turn") if reason == "stop" else _REASONS.get(as_text(reason))
    if named is None:
        raise InvalidAnswer("it ended for a reason that we do not know")
    return _NO_END | {"stop_reason": named}


class MessagesStream(TranslatedStream):
    """Turns the chunks of a chat answer into the events of a Messages stream: one block after the other."""

    def __init__(self, rewriter: MessagesRewriter) -> None:
        super().__init__(rewriter)
        self._request = rewriter
        self._usage = {"input_tokens": 0, "output_tokens": 0}
        self._begun = self._called = False
        self._index = -1
        self._open: Any = None  # the block that is being written: "text", or the index of a tool call
        self._end: dict[str, Any] | None = None

    def _events(self, chunk: dict[str, Any]) -> Iterable[bytes]:
        if not self._begun:
            self._begun, self._usage = True, _usage(chunk)
            yield _event("message_start", message=self._request.begun(self._usage))
        if chunk.get("usage"):
            self._usage = _usage(chunk)
        for choice in objects(chunk.get("choices")):
            if choice.get("index", 0) != 0 or self._end is not None:
                continue
            delta = as_object(choice.get("delta"))
            text = as_text(delta.get("content")) + as_text(delta.get("refusal"))
            if text:
                yield from self._turn("text", _text(""))
                yield self._piece("text_delta", text=text)
            for position, call in enumerate(objects(delta.get("tool_calls"))):
                yield from self._call(position, call)
            if choice.get("finish_reason") is not None:
                self._end = _end(choice, called=self._called)
                yield from self._turn(None)

    def _call(self, position: int, given: dict[str, Any]) -> Iterable[bytes]:
        index, named = as_count(given.get("index")), as_object(given.get("function"))
        index = position if index is None else index
        if index != self._open:
            call_id, name, _ = call_of({**given, "function": {"arguments": "", **named}})
            self._called = True
            yield from self._turn(index, _tool_use(call_id, name, {}))
        if named.get("arguments"):
            yield self._piece("input_json_delta", partial_json=named["arguments"])

    def _turn(self, kind: Any, block: dict[str, Any] | None = None) -> Iterable[bytes]:
        """Close the block that is open, and open one of another kind."""
        if kind == self._open:
            return
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = kind
        if block is not None:
            self._index += 1
            yield _event("content_block_start", index=self._index, content_block=block)

    def _piece(self, kind: str, **piece: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **piece})

    def _terminal(self) -> bytes:
        end, self._end = self._end, {}
        if end is None:
            raise InvalidAnswer("the stream ended without a finish reason")
        return _event("message_delta", delta=end, usage=self._usage) + _event("message_stop") if end else b""


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dump({"type": kind, **fields}) + b"\n\n"
