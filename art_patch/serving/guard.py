"""Middleware that decides who may call a server: no web page (`PageGuard`), nobody without the API key (`KeyGuard`).

A browser on this machine reaches loopback, too. `PageGuard` refuses the three ways in which a web page can use that: by
a domain name that resolves to 127.0.0.1 (DNS rebinding), by a request across origins, and by a form.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from art_patch._lib.http_server import is_loopback
from art_patch.serving.request_checks import error_body

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/?#@\[\]\\]+)(?::\d+)?")


class PageGuard:
    """The ASGI middleware; it comes before everything else."""

    def __init__(self, app: ASGIApp, names: Collection[str] | None, json_paths: Collection[str]) -> None:
        """Guard `app`.

        Args:
            names: by which it may be called besides loopback's own; `None` beyond loopback, where it has any name.
            json_paths: where a POST must say that it is JSON.
        """
        self._app = app
        self._names = None if names is None else {name.lower() for name in names if not _is_loopback(name.lower())}
        self._json_paths = frozenset(json_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "http":
            refusal = self._why_not(scope)
            if refusal is not None:
                code, message = refusal
                await JSONResponse(error_body(code, message), status_code=code)(scope, receive, send)
                return
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
            # A form can send a body that looks like JSON without asking first (CORS preflight), but not under this
            # type.
            kind = "".join(_values(scope, b"content-type")).partition(";")[0].strip()
            if kind != "application/json":
                return 415, "the body must be JSON and say so; send the header content-type: application/json"
        return None

    def _is_here(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        name = match[1].strip("[]") if match else ""
        return _is_loopback(name) or name in (self._names or ())


class KeyGuard:
    """The ASGI middleware that asks for the API key on every route but `/health`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] == "http" and scope["path"] != "/health" and not shows_key(scope, self._api_key):
            message = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`."
            response = JSONResponse(error_body(401, message, code="invalid_api_key"), status_code=401)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def shows_key(scope: Scope, key: str) -> bool:
    """Whether a request carries this key, as `Authorization: Bearer KEY`."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    # Takes the same time wherever the two differ, so that nobody can guess a key byte by byte.
    return hmac.compare_digest(given, f"Bearer {key}".encode())


def _is_loopback(name: str) -> bool:
    return name == "localhost" or is_loopback(name)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").lower() for key, value in scope["headers"] if key == name]
