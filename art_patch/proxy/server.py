"""Runs the proxy: patches this process, serves until it is told to stop, and writes the queued records."""

import json
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from opentelemetry import context, propagate, trace
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from art_patch._lib import asgi, http_server, probes
from art_patch._lib.asgi import Caller, Gone, Pairs, error_body
from art_patch.context import group, recorded_only, trajectory
from art_patch.errors import ConfigError
from art_patch.patching import flush, patch, status, unpatch
from art_patch.proxy.upstream import (
    KEY,
    TRAJECTORY,
    Sent,
    Unreachable,
    Upstream,
    caller_context,
    first,
    for_caller,
    may_learn,
)  # fmt: skip

FLUSH_S = 10.0

_NO_KEY = "the proxy's key is missing or wrong; send it as the header x-art-key"


def run_proxy(
    upstream: str, *, host: str = "127.0.0.1", port: int = 0, key: str | None = None,
    on_ready: Callable[[str], None] | None = None, drain_s: float = 30.0, stop: threading.Event | None = None,
    max_body: int = asgi.MAX_BODY_BYTES, monitor: probes.Monitor | None = None, **settings: Any,
) -> None:  # fmt: skip
    """Serve until SIGTERM, SIGINT or `stop`; then finish running requests and write the queued records to the store.

    Args:
        key: the key that callers must send in the header `x-art-key`.
        max_body: the largest body in bytes that is recorded and routed; a larger one goes upstream unread.
        monitor: counts the requests; without one there is no `/livez`, `/readyz` and `/metrics`.
        settings: the arguments of `patch()`, which documents them.

    Raises:
        ConfigError: if an address or setting is impossible, or the address is beyond loopback and there is no key.
        PortInUse: if another process listens there.
        KeyboardInterrupt: if SIGINT stopped the server. It is raised after the records are written.
    """
    with http_server.listen(host, port, key=key, what="your provider and your store") as sock:
        _check_upstream(upstream, sock.getsockname()[1])
        # After the checks of the addresses, so that a wrong one leaves this process unpatched.
        patch(**settings)
        try:
            here = http_server.url_of(host, sock) + PREFIX
            names = (host,) if http_server.is_loopback(sock.getsockname()[0]) else None
            app = build_app(upstream, key=key, names=names, max_body=max_body, monitor=monitor)
            ready = None if on_ready is None else partial(on_ready, here)
            # Uvicorn's log stays silent: it reports an answer as an error if upstream breaks it off.
            http_server.serve(app, sock, drain_s=drain_s, on_ready=ready, stop=stop, keep_alive_s=75, lifespan="on")
        finally:
            flush(FLUSH_S)
            unpatch()


def _check_upstream(upstream: str, own_port: int) -> None:
    try:
        parts = urlsplit(upstream)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--upstream {upstream!r} is not an address ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--upstream {upstream!r} is not an http(s) address; write it like https://api.openai.com/v1")
    if parts.username or parts.password:
        raise ConfigError("--upstream must not hold a password; callers send their own keys")
    if port == own_port and (parts.hostname == "localhost" or http_server.is_loopback(parts.hostname)):
        why = "is this proxy itself (is OPENAI_BASE_URL set?); name your provider's address"
        raise ConfigError(f"--upstream {upstream} {why}")


PREFIX = "/v1"

# These paths go through the patched SDK. `patching` decides which calls are recorded and routed.
SURFACES = frozenset({"/chat/completions", "/completions", "/messages", "/responses"})

_NOT_AS_THEY_CAME = frozenset({b"content-length", b"content-encoding"})

_log = logging.getLogger(__name__)


def build_app(
    base_url: str, *, key: str | None = None, names: Collection[str] | None = (), max_body: int = asgi.MAX_BODY_BYTES,
    monitor: probes.Monitor | None = None,
) -> Starlette:  # fmt: skip
    """Return the proxy's ASGI application; `base_url` is that of the provider. The process must be patched already.

    `key` is what callers must send in the header `x-art-key`; `names` are the host names that `PageGuard` accepts.
    `monitor` is that of `run_proxy`.
    """
    gateway = _Gateway(asgi.Intake(max_body))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        gateway.upstream = Upstream(base_url, max_body)
        yield
        await gateway.upstream.close()

    async def health(request: Request) -> Response:
        now, facts = status(), {"status": "ok"}
        # Without the key, which no server beyond loopback lacks, nothing is told but that the proxy answers.
        if key is None or asgi.shows(request.scope, KEY, key):
            facts |= {"mode": now.mode, "champion": now.champion, "engine": now.base_url}
            facts |= {"recorded": now.recorded, "not_routed": now.not_routed, "degraded": list(now.degraded)}
        return JSONResponse(facts)

    def may_read_metrics(request: Request) -> None:
        # Prometheus can send a bearer token in all of its releases, and another header only in the newest.
        if key is None or asgi.shows(request.scope, KEY, key):
            return
        if not asgi.shows(request.scope, b"authorization", f"Bearer {key}"):
            raise asgi.ApiError(401, f"{_NO_KEY}, or as `Authorization: Bearer KEY`")

    probed = [] if monitor is None else probes.routes(monitor, may_read_metrics)
    app = Starlette(
        routes=[Route("/health", health), *probed, Route(f"{PREFIX}/{{rest:path}}", gateway)],
        middleware=[
            *([Middleware(probes.Observed, monitor)] if monitor else []),
            Middleware(asgi.PageGuard, names=names, json_paths=[f"{PREFIX}{surface}" for surface in SURFACES]),
            *([Middleware(asgi.KeyGuard, KEY, key, _NO_KEY, free=(*probes.OPEN, "/metrics"))] if key else []),
        ],
        exception_handlers=dict.fromkeys((asgi.ApiError, HTTPException, Exception), _failed),
        lifespan=lifespan,
    )
    # A redirect would lose the body, and upstream decides which paths exist.
    app.router.redirect_slashes = False
    return app


class _Gateway:
    """Serves every request below `/v1`."""

    upstream: Upstream

    def __init__(self, intake: asgi.Intake) -> None:
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = Caller(scope, receive, send)
        path = caller.path.removeprefix(PREFIX)
        # Else a caller could reach paths of upstream's host outside of its API, or, by `/v1%2f@`, another host.
        if not path.startswith("/") or _climbs(path):
            await caller.refuse(
                400, error_body(400, "an address with dots in it, or without a slash behind /v1, is not passed on")
            )
            return
        url = self.upstream.url(path, caller.query)
        try:
            await self._serve(caller, path, url)
        except Gone:
            return
        except (Unreachable, asgi.ApiError) as error:
            if not caller.started:
                await caller.refuse(error.status, error_body(error.status, str(error)))

    async def _serve(self, caller: Caller, path: str, url: str) -> None:
        if caller.method == "POST" and path in SURFACES:
            try:
                self._intake.check(caller.announced, caller.announced)
            except asgi.ApiError as error:
                # The call matters more than its record.
                _log.warning("a call goes upstream unread and unrecorded: %s", error)
            else:
                async with self._intake.body(caller) as content:
                    if (body := _parse(content)) is not None:
                        streamed = bool(body.get("stream"))
                        sent = Sent(caller.method, url, caller.headers, content, decoded=True, streamed=streamed)
                        work = self._call(caller, path, sent, body)
                    else:
                        work = self._pass(caller, Sent(caller.method, url, caller.headers, content))
                    return await caller.while_here(work)
        content = caller.chunks() if caller.has_body else None
        await caller.while_here(self._pass(caller, Sent(caller.method, url, caller.headers, content)))

    async def _call(self, caller: Caller, surface: str, sent: Sent, body: dict[str, Any]) -> None:
        with _context_of(caller) as ours:
            response = await self.upstream.call(surface, sent, body)
            # The SDK has read the answer, so it is handed out decoded and with a new length.
            if response.is_closed:
                headers = for_caller(response.headers.raw, without=_NOT_AS_THEY_CAME)
                await caller.answer(response.status_code, headers + ours, response.content)
            else:
                headers = for_caller(response.headers.raw, without=frozenset({b"content-length"}))
                await _relay(response, caller, headers + ours)

    async def _pass(self, caller: Caller, sent: Sent) -> None:
        response = await self.upstream.pass_through(sent)
        await _relay(response, caller, for_caller(response.headers.raw))


def _climbs(path: str) -> bool:
    """Return whether a path has the segment `.` or `..` for any server, however often it resolves escapes."""
    for _ in range(3):
        path = unquote(path)
    return not {".", ".."}.isdisjoint(re.split(r"[/\\;]", path))


async def _relay(response: Any, caller: Caller, headers: Pairs) -> None:
    """Hand an open answer on, in the pieces and the encoding in which it comes."""
    try:
        await caller.begin(response.status_code, headers)
        async for chunk in response.aiter_raw():
            await caller.write(chunk)
    except Exception as error:
        # The answer stays incomplete on purpose, which tells the caller that something is missing.
        _log.warning("an answer broke off: %s", type(error).__name__)
    else:
        await caller.end()
    finally:
        await response.aclose()


@contextmanager
def _context_of(caller: Caller) -> Generator[Pairs]:
    """Put the caller's context in force while its call runs. Yields the headers that tell the caller its trajectory."""
    (group_key, about), run_id = caller_context(caller.headers), None
    if first(caller.headers, b"traceparent") is not None:
        carrier = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in caller.headers}
        context.attach(propagate.extract(carrier))  # in the task of this request alone, so it is never detached
        active = trace.get_current_span().get_span_context()
        run_id = f"{active.trace_id:032x}" if active.is_valid else None
    scopes = ExitStack()
    try:
        if not may_learn(caller.headers):
            scopes.enter_context(recorded_only())
        if group_key is not None:
            scopes.enter_context(group(group_key))
        if about:
            # The trace is the run, if the caller names a user or a task of it but no trajectory.
            about["id"] = about.get("id") or run_id
            run_id = scopes.enter_context(trajectory(**about)).id
        yield [(TRAJECTORY, run_id.encode())] if run_id else []
    finally:
        scopes.close()  # not a `with`: a call that fails or is cancelled does not end the caller's run with an error


def _parse(content: bytes) -> dict[str, Any] | None:
    """Return the body if it is a JSON object; `None` leaves it to upstream to refuse it."""
    try:
        value: Any = from_json(content)
    except ValueError:
        try:
            value = json.loads(content)  # slower, but accepts lone surrogates
        except (ValueError, RecursionError):
            return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


async def _failed(request: Request, error: Exception) -> Response:
    match error:
        case asgi.ApiError():
            return JSONResponse(error.body(), status_code=error.status)
        case HTTPException():
            message = f"{request.method} {request.url.path} is not served here; addresses begin with {PREFIX}/"
            return JSONResponse(error_body(error.status_code, message), status_code=error.status_code)
        case _:
            _log.error("a request failed", exc_info=error)
            message = f"the proxy failed on this request ({type(error).__name__})"
            return JSONResponse(error_body(500, message), status_code=500)
