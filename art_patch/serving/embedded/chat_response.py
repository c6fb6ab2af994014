"""Pieces of a generation to OpenAI's chat-completion JSON, whole or as stream chunks.

Both forms run the same `OutputText`, so a stream put together is the whole answer. With `return_token_ids` the names
are vLLM's: `prompt_token_ids` at the top level (in a stream on each choice's first chunk), `token_ids` on each choice.
In a stream every id and log-probability goes out at once, on a chunk without text where the text is held back.

`finish_reason` is `tool_calls` where at least one call was made and the model ended by itself; an answer that ran out
of tokens says `length` even if a call came before.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from art_patch.serving.embedded.chat_request import ChatRequest
from art_patch.serving.embedded.generation import EngineReason, Piece
from art_patch.serving.embedded.output_text import OutputText
from art_patch.serving.embedded.prompts import PromptEncoder
from art_patch.serving.embedded.tool_calls import ToolCall

JSON = dict[str, Any]


class ChatResponse:
    """Formats the answer to one request."""

    def __init__(self, request: ChatRequest, prompt_ids: list[int], prompts: PromptEncoder) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._prompts = prompts
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._sampled = 0

    def whole(self, pieces: Sequence[Piece]) -> JSON:
        """The response body; one piece a choice."""
        choices = [self._choice(piece) for piece in sorted(pieces, key=lambda piece: piece.index)]
        body = {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._prompt_ids
        return body

    def first_chunk(self, index: int) -> JSON:
        """Opens a choice of a stream."""
        choice: JSON = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choice |= {"logprobs": None, "finish_reason": None}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        return chunk

    def chunks(self, piece: Piece, state: ChoiceState) -> list[JSON]:
        """What to send for the next piece of a choice."""
        self._sampled += len(piece.token_ids)
        parts = state.text.push(piece.token_ids)
        if piece.reason is not None:
            parts += state.text.close()
        delta = state.delta(parts)
        proof = self._request.return_token_ids or self._request.logprobs
        if not delta and piece.reason is None and not proof:
            return []
        choice: JSON = {"index": piece.index, "delta": delta, "logprobs": self._logprobs(piece)}
        choice["finish_reason"] = _finish_reason(piece.reason, state.calls)
        if piece.reason is not None:
            choice["stop_reason"] = state.text.stop_string
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return [{**self._head("chat.completion.chunk"), "choices": [choice]}]

    def usage_chunk(self) -> JSON:
        """Ends a stream whose caller asked for usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def text(self) -> OutputText:
        """A fresh pipeline for one choice."""
        params = self._request.params
        return OutputText(
            self._prompts.decode, stops=params.stops, parse_tools=params.parse_tools, one_call=params.one_call
        )

    def _choice(self, piece: Piece) -> JSON:
        self._sampled += len(piece.token_ids)
        text = self.text()
        parts = [*text.push(piece.token_ids), *text.close()]
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        message: JSON = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        choice: JSON = {"index": piece.index, "message": message, "logprobs": self._logprobs(piece)}
        choice |= {"finish_reason": _finish_reason(piece.reason, len(calls)), "stop_reason": text.stop_string}
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _head(self, kind: str) -> JSON:
        model = self._request.model
        return {
            "id": self._id, "object": kind, "created": self._created, "model": model, "system_fingerprint": model,
        }  # fmt: skip

    def _usage(self) -> JSON:
        prompt = len(self._prompt_ids)
        return {
            "prompt_tokens": prompt, "completion_tokens": self._sampled, "total_tokens": prompt + self._sampled,
        }  # fmt: skip

    def _logprobs(self, piece: Piece) -> JSON | None:
        if not self._request.logprobs:
            return None
        content: list[JSON] = []
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            token, token_bytes = self._prompts.token_entry(token_id)
            content.append({"token": token, "logprob": logprob, "bytes": token_bytes, "top_logprobs": []})
        return {"content": content, "refusal": None}


class ChoiceState:
    """How far one choice of a stream has got."""

    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.calls = 0

    def delta(self, parts: Sequence[str | ToolCall]) -> JSON:
        """Formats new parts; empty where there are none."""
        delta: JSON = {}
        content = "".join(part for part in parts if isinstance(part, str))
        if content:
            delta["content"] = content
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if calls:
            delta["tool_calls"] = [{"index": self.calls + i, **_call(call)} for i, call in enumerate(calls)]
            self.calls += len(calls)
        return delta


def _call(call: ToolCall) -> JSON:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _finish_reason(reason: EngineReason | None, calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason
