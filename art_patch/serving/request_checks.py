"""Request checks of both engines: refuse web pages, missing keys, unsupported parameters and bodies that are too large.

The engine accepts a parameter if it implements it, if the parameter does not change the answer, or if its value is the
neutral one. It refuses any other with 400: to ignore it would give the caller another answer than it asked for.
"""

import asyncio
import hmac
import json
import logging
import math
import re
import time
from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar, cast

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from art_patch._lib.asgi import Caller, Gone
from art_patch._lib.http_server import is_loopback
from art_patch.serving.contract import MAX_BODY_BYTES
from art_patch.types import WAIT_HEADER

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"} | dict.fromkeys(
    (429, 503), "overloaded_error"
)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::\d+)?")
_LARGE_BODY_BYTES = 64 << 10  # reading more than this on the event loop would hold up all streams

_log = logging.getLogger(__name__)

T = TypeVar("T")


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


# Fields that identify the caller and leave the answer as it is.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
# Accepted with these values only, because with them the parameter changes nothing. SDKs and agent frameworks send many
# of these on every call without being asked to.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("store", "use_beam_search", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("functions", "stop_token_ids"), ([],)),
    "logit_bias": ({},),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}


def refuse_unsupported(fields: Mapping[str, Any], understood: Collection[str]) -> None:
    """Raises an `ApiError` (400) for the first request field that the engine neither implements nor may ignore."""
    for key, value in fields.items():
        if key in understood or key in _WITHOUT_EFFECT:
            continue
        if not any(value == neutral for neutral in _NEUTRAL.get(key, ())):
            raise unsupported(f"{key} = {short(value)} is not supported by this engine; leave it out", key)


def unsupported(message: str, param: str) -> ApiError:
    """Returns, without raising it, the 400 error for a parameter that the engine does not support."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def parse_object(body: bytes) -> dict[str, Any]:
    """Decodes a request body; raises an `ApiError` (400) if it is not a JSON object."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object")
    return cast("dict[str, Any]", parsed)


async def read_body(caller: Caller) -> bytes:
    """Reads a complete request body; raises `Gone`, or an `ApiError` (413) if it exceeds `MAX_BODY_BYTES`."""
    body = bytearray()
    async for chunk in caller.chunks():
        body += chunk
        # Counted while it arrives: a body without a Content-Length could otherwise fill the memory.
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    return bytes(body)


def accepted_wait_s(caller: Caller) -> float | None:
    """Returns the seconds that a request accepts to wait for its turn (`WAIT_HEADER`); `None` for any."""
    given = next((value for name, value in caller.headers if name == WAIT_HEADER.encode()), None)
    try:
        return None if given is None else float(given)
    except ValueError:
        raise ApiError(400, f"the header {WAIT_HEADER} is not a number of seconds") from None


class ChatRoute(Generic[T]):
    """ASGI application that answers chat completions; an engine adds how it understands a body and answers it."""

    _logged_at = -math.inf

    # Plain ASGI, because every chat request passes through it.
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one chat-completion request; the server turns what it raises into an error response."""
        caller = Caller(scope, receive, send)
        if caller.method != "POST":
            raise ApiError(405, "use POST")
        try:
            body = await read_body(caller)
            # Small bodies are read here: a thread costs more than it saves.
            read = asyncio.to_thread(self.understand, body) if len(body) > _LARGE_BODY_BYTES else None
            request = self.understand(body) if read is None else await read
            await caller.while_here(self.answer(caller, request))
        except Gone:
            pass
        except ApiError as error:
            self.log_refusal(error.status, str(error))
            raise

    def log_refusal(self, status: int, words: str) -> None:
        """Logs why a request was refused, at most once a minute."""
        if (now := time.monotonic()) - self._logged_at >= 60:
            self._logged_at = now
            # The words may repeat what the caller sent.
            _log.warning("a chat completion was refused with HTTP %d: %s", status, ascii(words[:500])[1:-1])

    def understand(self, body: bytes) -> T:
        """Checks a request body and returns what `answer` needs of it; may run in any thread."""
        raise NotImplementedError

    async def answer(self, caller: Caller, request: T) -> None:
        """Sends the answer to a request; cancelled if the caller disconnects."""
        raise NotImplementedError


def short(value: object) -> str:
    """Returns the `repr` of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class PageGuard:
    """ASGI middleware that refuses requests from web pages; it runs before all other middleware and routes.

    A browser on this machine can reach servers on loopback. So a web page could call the engine in three ways: through
    a domain name that resolves to 127.0.0.1 (DNS rebinding), by a cross-origin request, and by an HTML form.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] | None, json_paths: Collection[str]) -> None:
        """Guards `app`, whose `json_paths` are those for which a POST request must have a JSON content type.

        Args:
            names: host names in `Host` that are accepted besides loopback's own; `None`, for a server beyond loopback,
                accepts any.
        """
        self._app = app
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
    """ASGI middleware that answers 401 with `message` to a request without the key, on every route but `/health`."""

    def __init__(self, app: ASGIApp, header: bytes, value: str, message: str, code: str | None = None) -> None:
        self._app, self._header, self._value, self._message, self._code = app, header, value, message, code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose `header` is not `value` with 401, or passes the request on to the application."""
        if scope["type"] == "http" and scope["path"] != "/health" and not _shows(scope, self._header, self._value):
            response = JSONResponse(error_body(401, self._message, code=self._code), status_code=401)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def shows_key(scope: Scope, key: str) -> bool:
    """Whether a request carries `key` in the header `Authorization: Bearer KEY`."""
    return _shows(scope, b"authorization", f"Bearer {key}")


def _shows(scope: Scope, header: bytes, value: str) -> bool:
    given = next((value for name, value in scope["headers"] if name == header), b"")
    # Takes the same time wherever the two differ, so that no caller can guess a key byte by byte.
    return hmac.compare_digest(cast(bytes, given), value.encode())


def _is_loopback(name: str) -> bool:
    return name == "localhost" or is_loopback(name)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]
