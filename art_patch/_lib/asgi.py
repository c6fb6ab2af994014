"""The caller's side of one request, over ASGI: its body, its going away, and the answer written to it.

Raw ASGI and not a framework's request and response, because whoever waits for upstream must notice a caller that went
away, and because an answer that breaks in the middle must break for the caller, too.
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
    """One request of a caller, and the way back to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take over the three things that ASGI gives."""
        self.headers: Pairs = list(scope["headers"])
        self.method: str = scope["method"]
        # What stands before the `?`, escapes and all; `path` has them resolved already.
        self.path: str = scope.get("raw_path", scope["path"].encode()).split(b"?")[0].decode("ascii", "replace")
        self.query: str = scope["query_string"].decode("ascii", "replace")
        self.started = False
        self._receive = receive
        self._send = send
        self._read = asyncio.Event()

    @property
    def has_body(self) -> bool:
        """Whether the caller announced a body; asked once, before it is read."""
        announced = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if not announced:
            self._read.set()
        return announced

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            Gone: the caller closed the connection before it had sent it.
        """
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """Give the body as it comes.

        Raises:
            Gone: the caller closed the connection before it had sent it.
        """
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
        """Run `work` to its end, or cancel it when the caller goes away.

        Raises:
            Gone: the caller went away, and `work` has been cancelled.
        """
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
                working.exception()  # it failed on its way out; nobody is left to be told
            raise Gone
        working.result()

    async def _until_gone(self) -> None:
        await self._read.wait()  # until then the body's reader is the one who is told
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: Pairs) -> None:
        """Send the head of the answer."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the body; it leaves at once."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        """Send the last piece."""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a whole answer."""
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def refuse(self, status: int, body: dict[str, Any]) -> None:
        """Send an error of the proxy's own, as OpenAI writes them."""
        await self.answer(status, [(b"content-type", b"application/json")], json.dumps(body).encode())
