"""Sends each caller's request to upstream unchanged, and chooses the headers that go to upstream and to the caller.

Each call goes through one patched client of the OpenAI SDK. But the HTTP request to upstream is built from the caller's
own bytes and headers, so that the SDK and this process add nothing to it: no key, organisation, retry, user agent or
cookie. The request to the engine is a different one, which `patching` makes from the parsed body.
"""

import zlib
from contextvars import ContextVar
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from importlib import import_module
from typing import Any

import openai
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from art_patch._lib.asgi import Pairs
from art_patch.types import LEARN_HEADER

CONNECT_TIMEOUT_S = 30.0
KEPT_CONNECTIONS = 100

_ADDED_BY_THE_LIBRARY = (b"accept", b"accept-encoding", b"user-agent")


class Unreachable(Exception):
    """Upstream gave no answer. `status` is the HTTP status for the caller: 502, 504, or 400 for an invalid address."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Sent:
    """A caller's request, to be sent to upstream."""

    method: str  # in upper case
    url: str  # the full URL at upstream
    headers: Pairs
    content: Any  # the body; an asynchronous iterator of bytes if it was not read yet
    decoded: bool = False  # whether the proxy decompresses the answer for the caller
    streamed: bool = False  # whether the caller asked for events; an answer in events is never decompressed here


_SENT: ContextVar[Sent | None] = ContextVar("art_patch_proxy_sent", default=None)


class _Client(AsyncOpenAI):
    """A client of the SDK that sends the caller's request in place of its own."""

    def _build_request(self, options: Any, **_: Any) -> Any:
        sent = _SENT.get()
        assert sent is not None, "a request that no caller sent"
        return _as_sent(self._client, sent)


class Upstream:
    """Sends requests to the provider behind the proxy. It may be used in one event loop only, like its connections."""

    def __init__(self, base_url: str, max_answer: int) -> None:
        """Set `base_url` without connecting; a compressed answer may unpack to `max_answer` bytes."""
        self.base_url, self._max_answer = base_url.rstrip("/"), max_answer
        # The caller's patience is the limit: if it disconnects, the call is cancelled.
        timeout = openai.Timeout(None, connect=CONNECT_TIMEOUT_S)
        # A cookie would belong to one caller, and be sent with the next caller's call.
        cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        self._library = _library(DefaultAsyncHttpxClient)
        # The callers decide how many calls run at once. A call that waits here for a connection would seem to hang.
        limits = self._library.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS)
        self._pool: Any = DefaultAsyncHttpxClient(
            timeout=timeout, follow_redirects=False, cookies=cookies, limits=limits,
            event_hooks={"response": [self._unpack]},
        )  # fmt: skip
        self._client = _Client(base_url=self.base_url, api_key="none", http_client=self._pool, max_retries=0)

    def url(self, path: str, query: str) -> str:
        """Return the URL at upstream for a path below `/v1` and a query."""
        return f"{self.base_url}{path}" + (f"?{query}" if query else "")

    async def call(self, surface: str, sent: Sent, body: dict[str, Any]) -> Any:
        """Send a call through the patched SDK, and return the HTTP response, whatever its status.

        A successful stream is returned open, for the caller to read; the body of every other response is in memory.
        `surface` is the path below the base URL; from `body`, the parsed body of `sent`, the request to the engine is
        made. Raises `Unreachable` if upstream did not answer.
        """
        # By a context variable: the SDK has no argument by which a ready request could reach `_build_request`.
        token = _SENT.set(sent)
        try:
            kinds: dict[str, Any] = {"cast_to": self._library.Response, "stream_cls": openai.AsyncStream[object]}
            return await self._client.post(surface, body=body, stream=sent.streamed, **kinds)
        except openai.APIStatusError as error:
            return error.response
        except openai.APIConnectionError as error:
            raise self._unreachable(error.__cause__ or error) from error
        finally:
            _SENT.reset(token)

    async def pass_through(self, sent: Sent) -> Any:
        """Send a request without the SDK and return the open response; raise `Unreachable` if there is no answer."""
        try:
            return await self._pool.send(_as_sent(self._pool, sent), stream=True)
        except self._library.HTTPError as error:
            raise self._unreachable(error) from error
        except self._library.InvalidURL as error:
            raise Unreachable(400, f"that is no address upstream ({error})") from error

    async def _unpack(self, response: Any) -> None:
        """Read a compressed answer that the SDK would unpack whole: 300 kB may become 300 MB."""
        sent, encoding = _SENT.get(), response.headers.get("content-encoding", "identity")
        if sent is None or sent.streamed or encoding == "identity":
            return
        if encoding not in ("gzip", "x-gzip"):
            raise self._library.DecodingError(f"upstream's answer is in {encoding}, which was not asked for")
        unpacker, unpacked = zlib.decompressobj(wbits=31), bytearray()
        async for packed in response.aiter_raw():
            unpacked += unpacker.decompress(packed, self._max_answer + 1 - len(unpacked))
            if len(unpacked) > self._max_answer:
                await response.aclose()
                raise self._library.DecodingError("upstream's answer unpacks to too many bytes")
        # As `read` would leave it; private to the HTTP library, so the SDK's own use of it is what tests check.
        response._content = bytes(unpacked)

    def _unreachable(self, error: BaseException) -> Unreachable:
        kind = type(error).__name__
        if "Timeout" in kind:
            return Unreachable(504, f"upstream did not answer in time ({kind})")
        return Unreachable(502, f"upstream cannot be reached, or broke off ({kind})")

    async def close(self) -> None:
        """Close all connections to upstream."""
        await self._client.close()


def _as_sent(pool: Any, sent: Sent) -> Any:
    headers = sent.headers
    if sent.decoded:
        # gzip is the one encoding that every version of the HTTP library decodes.
        accepts_gzip = b"gzip" in (first(headers, b"accept-encoding") or b"").lower()
        headers = for_upstream(headers, without=frozenset({b"accept-encoding", b"content-length"}))
        headers.append((b"accept-encoding", b"gzip" if accepts_gzip else b"identity"))
    else:
        headers = for_upstream(headers)
    request = pool.build_request(sent.method, sent.url, headers=headers, content=sent.content)
    for name in _ADDED_BY_THE_LIBRARY:
        if first(headers, name) is None:
            # The library adds its own values for these headers if the caller sent none.
            del request.headers[name.decode()]
    return request


def _library(pool_class: type) -> Any:
    """Return httpx or httpx2, whichever this version of the SDK uses."""
    (kind,) = [base for base in pool_class.__mro__ if base.__name__ == "AsyncClient"]
    return import_module(kind.__module__.partition(".")[0])


# Headers: pairs of bytes, as in ASGI, so order, case and repetitions stay as they came.

OURS = b"x-art-"  # headers that begin like this are for the proxy and go no further
KEY = b"x-art-key"  # the proxy's own key; `Authorization` holds upstream's
TRAJECTORY = b"x-art-trajectory-id"
_LEARN = LEARN_HEADER.encode()

# RFC 9110, section 7.6.1; and `Expect`, which our server has answered already.
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)

# Header -> the argument of `trajectory()` that it becomes.
_ABOUT_THE_RUN = {
    TRAJECTORY: "id",
    b"x-art-scenario": "scenario",
    b"x-art-session-id": "session_id",
    b"x-art-user-id": "user_id",
}


def may_learn(headers: Pairs) -> bool:
    """Return whether a request's header `x-art-patch-learn` lets its run be learned from; without it, it does."""
    said = [value for name, value in headers if name.lower() == _LEARN]
    return all(value.strip().lower() in (b"yes", b"true", b"1", b"on") for value in said)


def caller_context(headers: Pairs) -> tuple[str | None, dict[str, Any]]:
    """Return the group key and the arguments of `trajectory()` that a request's `x-art-` headers give."""
    given = {name.lower(): value.decode("utf-8", "replace").strip() for name, value in headers}
    about: dict[str, Any] = {argument: given[name] for name, argument in _ABOUT_THE_RUN.items() if given.get(name)}
    return given.get(b"x-art-group") or None, about


def first(headers: Pairs, name: bytes) -> bytes | None:
    """Return the first value of a header; `None` if the header is missing."""
    return next((value for key, value in headers if key.lower() == name), None)


def for_upstream(headers: Pairs, *, without: frozenset[bytes] = frozenset()) -> Pairs:
    """Return the caller's headers for upstream, without hop-by-hop headers, `Host`, `x-art-` and those in `without`."""
    passed = _end_to_end(headers, without | {b"host"})
    return [(name, value) for name, value in passed if not name.lower().startswith(OURS)]


def for_caller(headers: Pairs, *, without: frozenset[bytes] = frozenset()) -> Pairs:
    """Return upstream's headers for the caller, without hop-by-hop headers and those in `without`."""
    return [(name.lower(), value) for name, value in _end_to_end(headers, without)]


def _end_to_end(headers: Pairs, without: frozenset[bytes]) -> Pairs:
    # `Connection` may name more headers that end at this hop.
    named = [value.split(b",") for name, value in headers if name.lower() == b"connection"]
    left_out = _HOP_BY_HOP | without | {part.strip().lower() for parts in named for part in parts}
    return [(name, value) for name, value in headers if name.lower() not in left_out]
