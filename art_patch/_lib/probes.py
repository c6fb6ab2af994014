"""`GET /livez`, `/readyz` and `/metrics` of a server, and the middleware that tells its monitor of each request.

Kubelets send no key, so the first two answer everybody, and name nothing. `/metrics` names policies and processes: who
may read it is up to the server.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN = ("/health", "/livez", "/readyz")
"""Paths that need no key."""

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Monitor(Protocol):
    """Counts the requests of a server, and says how it is."""

    def observe(self, scope: Mapping[str, Any], code: int, took_s: float) -> None:
        """Count a request that ended; `code` is 0 if it had no answer. Called on the event loop."""
        ...

    def why_not_ready(self) -> str | None:
        """Return in a line without any name why the server cannot answer now; `None` if it can."""
        ...

    def text(self) -> bytes:
        """Return the page for Prometheus; called in a thread."""
        ...


def routes(monitor: Monitor, check: Callable[[Request], None] | None = None) -> list[Route]:
    """Return the three routes; `check` raises an error for a caller who may not read `/metrics`."""

    async def livez(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        why = monitor.why_not_ready()
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    # Not `async`, so that Starlette runs it in a thread: a page takes milliseconds.
    def metrics(request: Request) -> Response:
        if check is not None:
            check(request)
        return Response(monitor.text(), headers={"content-type": _CONTENT_TYPE})

    return [Route("/livez", livez), Route("/readyz", readyz), Route("/metrics", metrics)]


class Observed:
    """ASGI middleware that tells a monitor of each request: its scope, its status, and the seconds until its end."""

    def __init__(self, app: ASGIApp, monitor: Monitor) -> None:
        self._app, self._monitor = app, monitor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and tell the monitor of it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, code = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            code = code or 500  # which the server answers outside of here
            raise
        finally:
            self._monitor.observe(scope, code, time.perf_counter() - began)
