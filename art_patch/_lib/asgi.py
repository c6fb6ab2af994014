"""The caller's side of one request over ASGI: its body, its disconnection, and the answer written to it.

Raw ASGI instead of a framework's request and response: code that waits for upstream must notice a caller that went
away, and an answer that breaks in the middle must break for the caller, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

Pairs = list[tuple[bytes, bytes]]
"""Headers as ASGI has them: order, case and repetitions stay as they came."""


class Gone(Exception):
    """The caller closed the connection."""


class Caller:
    """One request of a caller, and the way to answer it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take over the three arguments of an ASGI application."""
        self.headers: Pairs = list(scope["headers"])
        self.method: str = scope["method"]
        # `raw_path` keeps escapes, which `path` has resolved already; some servers put the query behind it.
        self.path: str = scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode("ascii", "replace")
        self.query: str = scope["query_string"].decode("ascii", "replace")
        self.started = False
        self._receive = receive
        self._send = send
        self._read = asyncio.Event()

    @property
    def has_body(self) -> bool:
        """Whether the caller announced a body; ask once, before the body is read."""
        announced = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if not announced:
            self._read.set()
        return announced

    async def body(self) -> bytes:
        """Return the whole body; raises `Gone` as `chunks` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raises `Gone` if the caller disconnects before it is complete."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        self._read.set()

    async def while_here(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, or cancel it and raise `Gone` when the caller disconnects."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over = working.done()
            watching.cancel()
            working.cancel()
            await asyncio.wait((working, watching))
        if not over:
            if not working.cancelled():
                working.exception()  # read, or asyncio would log an error that no caller waits for
            raise Gone
        working.result()

    async def _until_gone(self) -> None:
        # ASGI reports a disconnection to whoever waits in `receive`; until the body is read, `chunks` waits there.
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: Pairs) -> None:
        """Send the status and the headers of the answer."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the answer's body at once."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        """Send the last piece of the answer's body."""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a whole answer."""
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def refuse(self, status: int, body: dict[str, Any]) -> None:
        """Send an error of our own, in the form of OpenAI's errors."""
        await self.answer(status, [(b"content-type", b"application/json")], json.dumps(body).encode())
