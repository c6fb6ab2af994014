"""`POST /v1/chat/completions`: plain ASGI, because this is the hot path.

Reads the body, checks it, renders the prompt, starts a generation and sends its pieces on, as one JSON body or as
server-sent events. A client that goes away cancels its generation. Once a stream has begun, a failure is sent as an
error event and the stream ends without `[DONE]`, so no client takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from art_patch.serving.contract import MAX_BODY_BYTES, Overloaded, UnknownPolicy
from art_patch.serving.embedded.chat_request import ChatRequest, parse_chat_request
from art_patch.serving.embedded.chat_response import ChatResponse, ChoiceState
from art_patch.serving.embedded.generation import Generation, GenerationCancelled, GenerationFailed
from art_patch.serving.embedded.prompts import PromptEncoder, PromptError
from art_patch.serving.embedded.scheduler import EngineLimits
from art_patch.serving.http_errors import ApiError, error_body

_LARGE_BODY_BYTES = 64 << 10  # tokenising more than this would hold up everybody's streams


class _ClientGone(Exception):
    pass


class Generates(Protocol):
    """What the route needs of the engine."""

    prompts: PromptEncoder
    limits: EngineLimits
    max_model_len: int

    def policies(self) -> list[str]:
        """Served names, the base first."""
        ...

    def submit(self, policy_name: str, generation: Generation) -> None:
        """Queue a request; its pieces arrive on its event loop."""
        ...


class ChatEndpoint:
    """The route; one instance serves all requests."""

    def __init__(self, engine: Generates) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            if scope["method"] != "POST":
                raise ApiError(405, "use POST")
            body = await _read_body(receive)
            if len(body) > _LARGE_BODY_BYTES:
                request, prompt_ids = await asyncio.to_thread(self._understand, body)
            else:
                request, prompt_ids = self._understand(body)
            generation = self._start(request, prompt_ids)
        except ApiError as error:
            await _send_json(send, error.status, error.body())
            return
        except _ClientGone:
            return
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, generation))
        response = ChatResponse(request, prompt_ids, self._engine.prompts)
        try:
            if request.stream:
                await _stream(send, request, response, generation)
            else:
                await _send_json(send, 200, response.whole([piece async for piece in generation]))
        except GenerationFailed as error:
            await _send_json(send, 500, error_body(500, str(error), code="engine_error"))
        except (GenerationCancelled, OSError):
            pass  # the client is gone; nobody is left to tell
        finally:
            watcher.cancel()
            generation.cancel()  # frees the rows if this ended early, else does nothing

    def _understand(self, body: bytes) -> tuple[ChatRequest, list[int]]:
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON ({error})") from error
        request = parse_chat_request(parsed)
        if request.model not in self._engine.policies():
            raise self._unknown(request.model)
        try:
            prompt_ids = self._engine.prompts.encode(request.messages, request.tools, request.template_kwargs)
        except PromptError as error:
            raise ApiError(400, str(error), param="messages") from error
        return request, prompt_ids

    def _start(self, request: ChatRequest, prompt_ids: list[int]) -> Generation:
        room = self._engine.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise ApiError(400, "the prompt is empty", param="messages")
        if room < 1 or (request.max_tokens or 1) > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._engine.max_model_len} tokens; the prompt has "
                f"{len(prompt_ids)} and {request.max_tokens or 'at least one'} more were asked for.",
                param="messages",
                code="context_length_exceeded",
            )
        if request.params.n > self._engine.limits.max_rows:
            raise ApiError(400, f"n is limited to {self._engine.limits.max_rows} here", param="n")
        params = dataclasses.replace(request.params, max_tokens=request.max_tokens or room)
        generation = Generation(prompt_ids, params, stream=request.stream)
        try:
            self._engine.submit(request.model, generation)
        except UnknownPolicy as error:
            raise self._unknown(request.model) from error
        except Overloaded as error:
            raise ApiError(503, str(error), code="overloaded") from error
        return generation

    def _unknown(self, model: str) -> ApiError:
        served = ", ".join(self._engine.policies())
        message = f"The model `{model}` does not exist. Served models: {served}."
        return ApiError(404, message, param="model", code="model_not_found")


async def _stream(send: Send, request: ChatRequest, response: ChatResponse, generation: Generation) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    states = [ChoiceState(response.text()) for _ in range(request.params.n)]
    await _send_events(send, [response.first_chunk(index) for index in range(request.params.n)])
    try:
        async for piece in generation:
            await _send_events(send, response.chunks(piece, states[piece.index]))
    except GenerationFailed as error:
        await _send_events(send, [error_body(500, str(error), code="engine_error")])
        await send({"type": "http.response.body", "body": b""})
        return
    if request.include_usage:
        await _send_events(send, [response.usage_chunk()])
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _cancel_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.cancel()


async def _send_events(send: Send, events: Sequence[dict[str, Any]]) -> None:
    if events:
        body = b"".join(b"data: " + _dump(event) + b"\n\n" for event in events)
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    body = _dump(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
