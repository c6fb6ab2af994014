"""One HTTP request over ASGI, and what every HTTP server of art_patch checks before it works for a caller.

`Caller` reads the body, notices that the caller disconnects, and writes the answer. It uses raw ASGI, not a framework's
objects: code that waits for upstream must notice that the caller has disconnected, and the caller must see that an
answer which breaks off in the middle is broken.

`PageGuard` refuses web pages, `KeyGuard` callers without the key, `BodyGuard` and `Intake` what does not fit in memory.
`http_server` bounds what comes before that: the time and the length of a header, and the open connections.
"""

import asyncio
import hmac
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_patch._lib.http_server import is_loopback

Pairs = list[tuple[bytes, bytes]]
"""HTTP headers as ASGI passes them: (name, value) pairs with order, case and repetitions unchanged."""


class Gone(Exception):
    """The caller closed the connection before its request was answered."""


class Caller:
    """One HTTP request of a caller: its method, path, headers and body, and the methods that send the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


MAX_BODY_BYTES = 16 << 20  # largest request body that a server reads into memory, unless it is told otherwise

_AT_ONCE = 2  # this many of the largest bodies may be in memory at once
# A parsed list takes 20 times the bytes of its JSON, `[[],[],...]`. Text of this length rarely holds as many commas.
_MOST_COMMAS = 500_000

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"} | dict.fromkeys(
    (429, 503), "overloaded_error"
)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::\d+)?")


class ApiError(Exception):
    """A request was refused; `body()` and the status are sent to the caller as the HTTP response."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the HTTP response to the refused request."""
        return error_body(self.status, str(self), param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the JSON body of an error response, with the fields of OpenAI's errors."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Intake:
    """Reads request bodies into a server's memory: each of at most `most` bytes, all together twice as many."""

    def __init__(self, most: int = MAX_BODY_BYTES) -> None:
        self._most, self._held = most, 0

    def check(self, size: int, more: int) -> None:
        """Raises an `ApiError` if a body of `size` bytes is too large (413), or `more` bytes do not fit now (429)."""
        if size > self._most:
            raise ApiError(413, f"the body is larger than {self._most} bytes")
        if self._held + more > _AT_ONCE * self._most:
            raise ApiError(429, "other large requests fill the memory; try again", code="engine_full")

    @asynccontextmanager
    async def body(self, caller: Caller) -> AsyncGenerator[bytes]:
        """Yields a body, whose bytes count until the block ends; raises what `check` raises, or `Gone`."""
        self.check(announced := caller.announced, announced)
        parts, size = list[bytes](), 0
        try:
            # Counted while it arrives: a body without a Content-Length could otherwise fill the memory.
            async for chunk in caller.chunks():
                self.check(size + len(chunk), len(chunk))
                parts.append(chunk)
                size, self._held = size + len(chunk), self._held + len(chunk)
            body = b"".join(parts)
            parts.clear()
            if body.count(b",") > _MOST_COMMAS:
                raise ApiError(413, f"the body has more than {_MOST_COMMAS} commas; shorten its lists")
            # One character beyond ASCII, as it is or as an escape, makes each of its string take up to four bytes.
            if 2 * size > self._most and not (body.isascii() and b"\\u" not in body):
                raise ApiError(413, f"the body is larger than {self._most // 2} bytes and not plain ASCII")
            yield body
        finally:
            self._held -= size


class BodyGuard:
    """ASGI middleware that reads the bodies of POST requests to `paths` whole, or answers why `Intake` refuses them."""

    def __init__(self, app: ASGIApp, intake: Intake, paths: Collection[str]) -> None:
        self._app, self._intake, self._paths = app, intake, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose body is refused with an error, or passes it on with its complete body."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        try:
            async with self._intake.body(Caller(scope, receive, send)) as body:
                await self._app(scope, given(body, receive), send)
        except ApiError as error:
            await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)
        except Gone:
            pass


def given(body: bytes, receive: Receive) -> Receive:
    """Returns a `Receive` that gives the body once, then what comes from the caller, such as its disconnection."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return left.pop() if left else await receive()

    return give


class PageGuard:
    """ASGI middleware that refuses requests from web pages; it runs before all other middleware and routes.

    A browser on this machine can reach servers on loopback. So a web page could call one in three ways: through a
    domain name that resolves to 127.0.0.1 (DNS rebinding), by a cross-origin request, and by an HTML form.
    """

    def __init__(
        self, app: ASGIApp, names: Collection[str] | None, json_paths: Collection[str] = (), *, pages: bool = False
    ) -> None:
        """Guards `app`, whose `json_paths` are those for which a POST request must have a JSON content type.

        Args:
            names: host names in `Host` that are accepted besides loopback's own; `None`, for a server beyond loopback,
                accepts any.
            pages: whether the server is one for browsers, whose links are its keys; then only `Host` is checked.
        """
        self._app, self._pages = app, pages
        self._names = None if names is None else {name.lower() for name in names if not _is_loopback(name.lower())}
        self._json_paths = frozenset(json_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a web page's request with an error, or passes the request on to the application."""
        if scope["type"] == "http" and (refusal := self._why_not(scope)) is not None:
            code, message = refusal
            await JSONResponse(error_body(code, message), status_code=code)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_not(self, scope: Scope) -> tuple[int, str] | None:
        # DNS rebinding: the page's own domain resolves to 127.0.0.1, so for the browser it is no other origin. But then
        # `Host` holds that domain.
        host = _values(scope, b"host")
        if self._names is not None and not (len(host) == 1 and self._is_here(host[0])):
            known = "".join(f", {name}" for name in sorted(self._names))
            return 403, f"this server answers to 127.0.0.1 and localhost{known} only; call it by one of these names"
        if self._pages:
            return None
        # Programs send no `Origin`; a browser sends it with fetches across origins and with every POST.
        if any(origin.partition("://")[2] != "".join(host) for origin in _values(scope, b"origin")):
            return 403, "this server does not answer web pages; call it from a program, which sends no Origin"
        # Only browsers send this header, and they also send it where there is no `Origin`, as for an image's address.
        if not {"none", "same-origin"}.issuperset(_values(scope, b"sec-fetch-site")):
            return 403, "this server does not answer web pages; call it from a program"
        if scope["method"] == "POST" and scope["path"] in self._json_paths:
            # Without asking first (CORS preflight) a form can send a body like JSON, but not under this type.
            kind = "".join(_values(scope, b"content-type")).partition(";")[0].strip()
            if kind != "application/json":
                return 415, "the body must be JSON and say so; send the header content-type: application/json"
        return None

    def _is_here(self, host: str) -> bool:
        name = match[1].strip("[]") if (match := _HOST.fullmatch(host)) else ""
        return _is_loopback(name) or name in (self._names or ())


class KeyGuard:
    """ASGI middleware that answers 401 with `message` to a request without the key, except for paths in `free`."""

    def __init__(
        self, app: ASGIApp, header: bytes, value: str, message: str, code: str | None = None, *, free: Collection[str]
    ) -> None:
        self._app, self._header, self._value, self._message, self._code = app, header, value, message, code
        self._free = free

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose `header` is not `value` with 401, or passes the request on to the application."""
        if scope["type"] == "http" and scope["path"] not in self._free and not shows(scope, self._header, self._value):
            response = JSONResponse(error_body(401, self._message, code=self._code), status_code=401)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def shows(scope: Scope, header: bytes, value: str) -> bool:
    """Whether a request's `header`, in lower case, is exactly `value`."""
    given = next((value for name, value in scope["headers"] if name == header), b"")
    # Takes the same time wherever the two differ, so that no caller can guess a key byte by byte.
    return hmac.compare_digest(cast("bytes", given), value.encode())


def _is_loopback(name: str) -> bool:
    return name == "localhost" or is_loopback(name)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]
