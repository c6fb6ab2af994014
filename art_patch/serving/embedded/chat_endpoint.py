"""`POST /v1/chat/completions` of the embedded engine.

If a stream fails after it has begun, an error event ends it without `[DONE]`, so that no client takes a partial answer
for a complete one. Streamed and unstreamed answers go through the same `OutputText`, so the chunks of a stream add up
to the unstreamed answer.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from art_patch._lib.asgi import ApiError, Caller, error_body
from art_patch.serving.contract import unknown_model
from art_patch.serving.embedded.chat_request import ChatRequest, Grammars, parse_chat_request
from art_patch.serving.embedded.generation import EngineReason, Generation, GenerationFailed, Piece
from art_patch.serving.embedded.text import OutputText, PromptEncoder, PromptError, PromptTooLong, ToolCall
from art_patch.serving.request_checks import ChatRoute, accepted_wait_s, parse_object

JSON = dict[str, Any]

_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ChatEndpoint(ChatRoute[tuple[ChatRequest, list[int]]]):
    """ASGI application that answers the embedded engine's chat completions; one instance answers all requests."""

    def __init__(
        self, prompts: PromptEncoder, grammars: Grammars, max_model_len: int, max_rows: int,
        policies: Callable[[], list[str]], submit: Callable[[str, Generation, float | None], None],
    ) -> None:  # fmt: skip
        """Takes the parts of `EmbeddedEngine` that it needs; the engine itself imports this module."""
        super().__init__()
        self._prompts, self._grammars = prompts, grammars
        self._max_model_len, self._max_rows = max_model_len, max_rows
        self._policies, self._submit = policies, submit

    def understand(self, body: bytes) -> tuple[ChatRequest, list[int]]:
        """Returns the checked request and the token ids of its prompt."""
        request = parse_chat_request(parse_object(body))
        if request.model not in (served := self._policies()):
            raise unknown_model(request.model, served)
        try:
            given = (request.messages, request.tools, request.template_kwargs)
            return request, self._prompts.encode(*given, most_tokens=self._max_model_len)
        except PromptTooLong as error:
            message = f"This model's maximum context length is {self._max_model_len} tokens; {error}."
            raise ApiError(400, message, param="messages", code="context_length_exceeded") from error
        except PromptError as error:
            raise ApiError(400, str(error), param="messages") from error

    def policy_of(self, request: tuple[ChatRequest, list[int]]) -> str:
        """Returns the name that a request asks for."""
        return request[0].model

    async def answer(self, caller: Caller, request: tuple[ChatRequest, list[int]]) -> None:
        """Generates an answer and sends it; frees its rows if the caller disconnects."""
        asked, prompt_ids = request
        grammar = None if asked.grammar is None else await self._grammars.compile(asked.grammar)
        generation = self._start(asked, prompt_ids, grammar, accepted_wait_s(caller))
        response = ChatResponse(asked, prompt_ids, self._prompts)
        try:
            if asked.stream:
                await _stream(caller, asked, response, generation)
            else:
                await _send_json(caller, 200, response.whole([piece async for piece in generation]))
        except GenerationFailed as error:
            await _send_json(caller, error.status, error_body(error.status, str(error), code="engine_error"))
        finally:
            generation.cancel()  # frees the rows if this ended early, else does nothing

    def _start(self, request: ChatRequest, prompt_ids: list[int], grammar: Any, accepted_s: float | None) -> Generation:
        room = self._max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise ApiError(400, "the prompt is empty", param="messages")
        if room < 1 or (request.max_tokens or 1) > room:
            message = (
                f"This model's maximum context length is {self._max_model_len} tokens; the prompt has "
                f"{len(prompt_ids)} and {request.max_tokens or 'at least one'} more were asked for."
            )
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        # The choices of a request are admitted together, so none may have more choices than rows run at once.
        if request.params.n > self._max_rows:
            raise ApiError(400, f"n is limited to {self._max_rows} here", param="n")
        # Without a limit of the caller's the answer may fill the rest of the context, as at OpenAI.
        params = dataclasses.replace(request.params, max_tokens=request.max_tokens or room, grammar=grammar)
        generation = Generation(prompt_ids, params, stream=request.stream)
        self._submit(request.model, generation, accepted_s)
        return generation


async def _stream(caller: Caller, request: ChatRequest, response: "ChatResponse", generation: Generation) -> None:
    await caller.begin(200, _STREAM_HEADERS)
    # One state a choice: their pieces arrive interleaved.
    states = [ChoiceState(response.reader()) for _ in range(request.params.n)]
    await _send_events(caller, [response.first_chunk(index) for index in range(request.params.n)])
    try:
        async for piece in generation:
            await _send_events(caller, response.chunks(piece, states[piece.index]))
    except GenerationFailed as error:
        await _send_events(caller, [error_body(500, str(error), code="engine_error")])
        await caller.end()
        return
    if request.include_usage:
        await _send_events(caller, [response.usage_chunk()])
    await caller.end(b"data: [DONE]\n\n")


async def _send_events(caller: Caller, events: Sequence[JSON]) -> None:
    if events:
        await caller.write(b"".join(b"data: " + _dump(event) + b"\n\n" for event in events))


async def _send_json(caller: Caller, status: int, content: JSON) -> None:
    await caller.answer(status, [(b"content-type", b"application/json")], _dump(content))


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


class ChatResponse:
    """Formats the answer to one request, either as one JSON body or as the chunks of a stream."""

    def __init__(self, request: ChatRequest, prompt_ids: list[int], prompts: PromptEncoder) -> None:
        self._request, self._prompt_ids, self._prompts = request, prompt_ids, prompts
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._sampled = 0
        self.reader = partial(request.params.reader, prompts.decode)  # makes one for each choice

    def whole(self, pieces: Sequence[Piece]) -> JSON:
        """Returns the JSON body of an unstreamed answer; `pieces` has one piece for each choice."""
        choices = [self._choice(piece) for piece in sorted(pieces, key=lambda piece: piece.index)]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage(), **self._prompt()}

    def first_chunk(self, index: int) -> JSON:
        """Returns the first chunk of choice `index` of a stream: the assistant's role and no text yet."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **self._prompt()}

    def chunks(self, piece: Piece, state: "ChoiceState") -> list[JSON]:
        """Returns the chunks to send for the next piece of a choice: one, or none while there is nothing to tell."""
        self._sampled += len(piece.token_ids)
        parts = state.text.push(piece.token_ids)
        if piece.reason is not None:
            parts += state.text.close()
        delta = state.delta(parts)
        # Ids and log-probabilities are never held back: where text is, they go out on a chunk without text.
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
        """Returns the chunk with the token counts, which ends a stream if the request asked for usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _choice(self, piece: Piece) -> JSON:
        self._sampled += len(piece.token_ids)
        text = self.reader()
        content, calls = _split([*text.push(piece.token_ids), *text.close()])
        # OpenAI's `content` is null beside calls, and an empty string where the model wrote nothing at all.
        message: JSON = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        choice: JSON = {"index": piece.index, "message": message, "logprobs": self._logprobs(piece)}
        choice |= {"finish_reason": _finish_reason(piece.reason, len(calls)), "stop_reason": text.stop_string}
        if self._request.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _prompt(self) -> JSON:
        return {"prompt_token_ids": self._prompt_ids} if self._request.return_token_ids else {}

    def _head(self, kind: str) -> JSON:
        model = self._request.model
        head = {"id": self._id, "object": kind, "created": self._created}
        return {**head, "model": model, "system_fingerprint": model}

    def _usage(self) -> JSON:
        prompt, sampled = len(self._prompt_ids), self._sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _logprobs(self, piece: Piece) -> JSON | None:
        if not self._request.logprobs:
            return None
        content: list[JSON] = []
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            token, token_bytes = self._prompts.token_entry(token_id)
            content.append({"token": token, "logprob": logprob, "bytes": token_bytes, "top_logprobs": []})
        return {"content": content, "refusal": None}


class ChoiceState:
    """State of one choice of a stream: the text produced so far, and the number of tool calls in it."""

    def __init__(self, text: OutputText) -> None:
        self.text = text
        self.calls = 0

    def delta(self, parts: Sequence[str | ToolCall]) -> JSON:
        """Formats text and tool calls as the `delta` of a chunk; `{}` if `parts` is empty."""
        content, calls = _split(parts)
        delta: JSON = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls, self.calls)]
            self.calls += len(calls)
        return delta


def _split(parts: Sequence[str | ToolCall]) -> tuple[str, list[JSON]]:
    calls: list[JSON] = []
    for call in parts:
        if isinstance(call, ToolCall):
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
    return "".join(part for part in parts if isinstance(part, str)), calls


def _finish_reason(reason: EngineReason | None, calls: int) -> str | None:
    # An answer that ran out of tokens has `length` even after a call.
    return "tool_calls" if reason == "stop" and calls else reason
