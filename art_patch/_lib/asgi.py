"""One HTTP request over ASGI: reading its body, noticing that the caller disconnects, and writing the answer.

It uses raw ASGI, not a framework's objects: code that waits for upstream must notice that the caller has disconnected,
and the caller must see that an answer which breaks off in the middle is broken.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.types import Receive, Scope, Send

Pairs = list[tuple[bytes, bytes]]
"""HTTP headers as ASGI passes them: (name, value) pairs with order, case and repetitions unchanged."""


class Gone(Exception):
    """The caller closed the connection before its request was answered."""


class Caller:
    """One HTTP request of a caller: its method, path, headers and body, and the methods that send the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Create the object from the three arguments of an ASGI application."""
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
    def announced(self) -> int:
        """The length of the body in bytes by the request's headers; 0 if they do not tell it."""
        return next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    @property
    def has_body(self) -> bool:
        """Whether the request's headers announce a body. Read it at most once, before the body is read."""
        announced = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if not announced:
            self._read.set()
        return announced

    async def body(self) -> bytes:
        """Return the complete request body; raises `Gone` if the caller disconnects before all of it has arrived."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the request body in pieces as they arrive; raises `Gone` if the caller disconnects before its end."""
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
        """Run `work`, or cancel it and raise `Gone` when the caller disconnects. A request body must have been read."""
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
        """Send the status and the headers of the answer; `write` and `end` then send its body."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        """Send a piece of the answer's body to the caller without waiting for more."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        """Send the last piece of the answer's body, which may be empty, and complete the answer."""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a complete answer: status, headers with the body's length, and body."""
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)

    async def refuse(self, status: int, body: dict[str, Any]) -> None:
        """Send an error answer with a JSON body, which has the fields of OpenAI's errors."""
        await self.answer(status, [(b"content-type", b"application/json")], json.dumps(body).encode())
