"""Chat completions for scripts that train by hand: each choice carries its exact tokens, whatever client asks.

`POST /exact/v1/chat/completions` differs from `/v1/chat/completions` in two things. The model's bare NAME stands for
the policy that serves at the moment of the call. Each choice of a whole answer carries `art_patch`
(`art_patch.trajectories.token_payload`): clients that keep unknown fields, such as the OpenAI SDK, hand the tokens to
the trainer together with the choice. The usual fields for token ids and log-probabilities are filled only if the
request asked for them. Streams pass unchanged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_patch.serving.request_checks import read_body
from art_patch.trajectories import hang

PREFIX = "/exact"
"""Of the address, before `/v1`."""


def exact_url(base_url: str) -> str:
    """Return the address for scripts beside an engine's own, which ends in `/v1`."""
    return f"{base_url.rstrip('/').removesuffix('/v1')}{PREFIX}/v1"


class ExactRoute:
    """The route; one instance serves all requests."""

    def __init__(self, chat: ASGIApp, serves: Callable[[str], str | None] | None) -> None:
        """Answer by `chat`.

        Args:
            chat: the engine's own route.
            serves: NAME -> the policy that serves under it now, or `None`; called in a thread. Without it there are
                no bare names.
        """
        self._chat = chat
        self._serves = serves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        began, started_at = time.perf_counter(), time.time()
        body = await read_body(receive)
        if body is None:
            return
        asked = _object(body)
        if asked is None:  # not a JSON object: the engine's own route answers with the error
            await self._chat(scope, _given(body, receive), send)
            return
        # Resolved once and sent on as NAME@STEP: a promotion during the call must not change whose tokens these are.
        sent = {**asked, "model": await self._policy(asked.get("model"))}
        if asked.get("stream"):
            await self._chat(scope, _given(_dump(sent), receive), send)
            return
        answered = _Answer(send)
        sent |= {"logprobs": True, "return_token_ids": True}
        await self._chat(scope, _given(_dump(sent), receive), answered)
        if answered.body is not None:
            answer = json.loads(answered.body)
            hang(answer, asked, started_at=started_at, duration_ms=(time.perf_counter() - began) * 1000)
            await answered.replace(_dump(answer))

    async def _policy(self, model: Any) -> Any:
        if self._serves is None or not isinstance(model, str) or "@" in model:
            return model
        # In a thread, because it reads the store and the event loop must go on streaming.
        return await asyncio.to_thread(self._serves, model) or model


class _Answer:
    """Takes what the engine sends: passes errors on, and holds a whole answer back."""

    def __init__(self, send: Send) -> None:
        self.body: bytes | None = None
        self._send = send
        self._start: Message | None = None
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body"):
                self.body = b"".join(self._parts)

    async def replace(self, body: bytes) -> None:
        """Send this in place of what was held back."""
        start = cast("Message", self._start)
        # The body has grown, so the length that the engine wrote is wrong.
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})


def _given(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what comes from the caller."""
    left = [body]

    async def give() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return give


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        read: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else None


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
