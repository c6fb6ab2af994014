"""Serves an engine over HTTP as `serving.contract` describes. SIGTERM waits up to `drain_s` for running requests."""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_patch._lib import asgi, http_server, key_files, probes
from art_patch._lib.asgi import ApiError
from art_patch._lib.events import event
from art_patch.errors import AdapterRejected
from art_patch.serving.contract import EXACT_PREFIX, EngineFull, Overloaded, UnknownPolicy
from art_patch.serving.request_checks import parse_object
from art_patch.trajectories import hang

if TYPE_CHECKING:
    from art_patch.serving.embedded.engine import EmbeddedEngine
    from art_patch.serving.vllm.engine import VllmEngine

Served: TypeAlias = "EmbeddedEngine | VllmEngine"  # an engine in this process, as the server calls it

_CHAT, _LOAD, _UNLOAD = "/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_KEY = b"authorization"  # the header
_NO_KEY = "The API key is missing or wrong. Send it as `Authorization: Bearer KEY`."
_NO_ADMIN = (
    f"loading and unloading policies needs the project's key; send the content of its file {key_files.ADMIN_KEY_FILE} "
    "as `Authorization: Bearer KEY`, or run `art-patch` as the user and in the home of the server"
)

_log = logging.getLogger(__name__)


def build_app(
    engine: Served, *, api_key: str | None = None, admin_key: str | None = None, names: Collection[str] | None = (),
    serves: Callable[[str], str | None] | None = None, max_body: int = asgi.MAX_BODY_BYTES,
    monitor: probes.Monitor | None = None,
) -> Starlette:  # fmt: skip
    """Returns the ASGI application that answers the routes of the engine's HTTP contract; it never closes the engine.

    Args:
        api_key: key that callers must send on every route but `probes.OPEN`; `None` requires none.
        admin_key: key for loading and unloading, if there is no `api_key`. Without either key, neither is allowed.
        names: host names in `Host` that are accepted besides loopback's own; `None` accepts any name.
        serves: returns the policy that is champion of a NAME now, or `None`; used by `ExactRoute`.
        max_body: largest request body in bytes; a larger one is refused with 413.
        monitor: counts the requests; without one there is no `/livez`, `/readyz` and `/metrics`.
    """
    started = int(time.time())

    def check_key(request: Request) -> None:
        if api_key is None and not (admin_key and asgi.shows(request.scope, _KEY, f"Bearer {admin_key}")):
            raise ApiError(401, _NO_ADMIN, code="invalid_api_key")

    async def health(_: Request) -> Response:
        return Response(status_code=200 if engine.healthy else 503)

    async def models(_: Request) -> Response:
        base = engine.base_policy
        card = {"object": "model", "created": started, "owned_by": "art_patch", "max_model_len": engine.max_model_len}
        parents = {name: None if name == base else base for name in engine.policies()}
        cards = [{"id": name, "root": name, "parent": parent, **card} for name, parent in parents.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def load(request: Request) -> Response:
        check_key(request)
        body = await _lora_body(request)
        _check_path(engine, body)
        await _load(engine, body["lora_name"])
        return PlainTextResponse(f"Success: {body['lora_name']} is served.")

    async def unload(request: Request) -> Response:
        check_key(request)
        body = await _lora_body(request)
        await engine.unload(body["lora_name"])
        event("serve", "%s was unloaded", body["lora_name"], event="unload", policy=body["lora_name"])
        return PlainTextResponse(f"Success: {body['lora_name']} is no longer served.")

    chats = (_CHAT, f"{EXACT_PREFIX}{_CHAT}")
    posts = (*chats, _LOAD, _UNLOAD)
    key_guard = Middleware(asgi.KeyGuard, _KEY, f"Bearer {api_key}", _NO_KEY, "invalid_api_key", free=probes.OPEN)
    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route(_CHAT, engine.chat),
            Route(f"{EXACT_PREFIX}/v1/models", models),
            Route(chats[1], ExactRoute(engine.chat, serves)),
            Route(_LOAD, load, methods=["POST"]),
            Route(_UNLOAD, unload, methods=["POST"]),
            *(probes.routes(monitor) if monitor else []),
        ],
        middleware=[  # the first is the outermost: a web page is refused before its key is looked at
            *([Middleware(probes.Observed, monitor)] if monitor else []),
            Middleware(asgi.PageGuard, names=names, json_paths=posts),
            *([key_guard] if api_key else []),
            Middleware(asgi.BodyGuard, asgi.Intake(max_body), posts),
        ],
        exception_handlers=dict.fromkeys(
            (ApiError, HTTPException, AdapterRejected, UnknownPolicy, Overloaded, Exception), _respond
        ),
    )


def run_server(
    engine: Served, *, host: str = "127.0.0.1", port: int = 8000, api_key: str | None = None,
    admin_key: str | None = None, names: Sequence[str] = (), policies: Sequence[str] = (), spare: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None, may_close: Callable[[], bool] = lambda: True, drain_s: float = 30.0,
    stop: threading.Event | None = None, serves: Callable[[str], str | None] | None = None,
    max_body: int = asgi.MAX_BODY_BYTES, monitor: probes.Monitor | None = None,
) -> None:  # fmt: skip
    """Serves an engine until SIGTERM, SIGINT or `stop`; then finishes running requests, closes the engine and returns.

    If a signal ends it, it sets `stop` first, and answers new requests until `may_close` returns true. `api_key`,
    `admin_key`, `serves`, `max_body` and `monitor` are those of `build_app`.

    Args:
        names: other host names of this server, such as that of a reverse proxy in front of it.
        policies: policies to load before the first request is answered; if one cannot be loaded, the server fails.
        spare: policies to load as well; an error of these is only logged, and requests for them get 404.

    Raises:
        ConfigError: the address is not loopback and there is no key.
        PortInUse: another process listens on the port.
        EngineError: the engine did not start, or a policy cannot be loaded.
        KeyboardInterrupt: SIGINT stopped the server; raised after running requests have finished.
    """
    try:
        # Bound before vLLM is started, so that a port that is taken shows at once and not after minutes. The socket
        # listens only when the engine is ready: until then callers are refused instead of waiting.
        with http_server.bind(host, port, key=api_key, what="the model") as sock:
            # Beyond loopback the server has any name, and a key is required instead.
            known = (host, *names) if http_server.is_loopback(str(sock.getsockname()[0])) else None
            app = build_app(
                engine, api_key=api_key, admin_key=admin_key, names=known, serves=serves, max_body=max_body,
                monitor=monitor,
            )  # fmt: skip
            http_server.serve(
                app, sock, drain_s=drain_s,
                on_ready=None if on_ready is None else partial(on_ready, http_server.url_of(host, sock)), stop=stop,
                before=partial(_begin, engine, policies, spare), may_close=may_close, after=engine.stop,
                keep_alive_s=75, log_level=None, date_header=True,
            )  # fmt: skip
    finally:
        engine.close()


async def _begin(engine: Served, policies: Sequence[str], spare: Sequence[str]) -> None:
    await engine.start()
    for name in (*policies, *spare):
        if name in engine.policies():  # the bare base is served from the start
            continue
        try:
            await _load(engine, name)
        except AdapterRejected as error:
            if name not in spare:  # without the champion the server is of no use
                raise
            _log.warning("%s is not served: %s", name, error)


async def _load(engine: Served, name: str) -> None:
    began = time.monotonic()
    await engine.load(name)
    took_s = round(time.monotonic() - began, 3)
    event("serve", "%s was loaded in %.1f s", name, took_s, event="load", policy=name, took_s=took_s)


async def _lora_body(request: Request) -> dict[str, Any]:
    fields = parse_object(await request.body())
    if not isinstance(fields.get("lora_name"), str):
        raise ApiError(400, "lora_name must be given as a string", param="lora_name")
    if unknown := set(fields) - {"lora_name", "lora_path", "lora_int_id"}:
        raise ApiError(400, f"{', '.join(sorted(unknown))} is not supported by this engine; leave it out")
    return fields


def _check_path(engine: Served, body: dict[str, Any]) -> None:
    # vLLM's own API loads any path. Here a name means the published directory, whose files are validated; a path may
    # confirm it and no more.
    own = engine.adapters_root / body["lora_name"]
    path = body.get("lora_path")
    if path is not None and (not isinstance(path, str) or "\0" in path or Path(path).resolve() != own):
        message = "lora_path is not the directory of that policy; leave it out"
        raise ApiError(400, message, param="lora_path", code="adapter_rejected")


async def _respond(request: Request, error: Exception) -> Response:
    refusal = _refusal(request, error)
    headers: dict[str, str] = {}
    if isinstance(error, EngineFull):
        # The header of HTTP knows whole seconds only; the OpenAI SDK prefers the other one.
        headers = {"retry-after": str(math.ceil(error.retry_s)), "retry-after-ms": str(round(error.retry_s * 1000))}
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=headers)


def _refusal(request: Request, error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case HTTPException():
            asked = f"{request.method} {request.url.path}"
            return ApiError(error.status_code, f"{asked} is not served here: {error.detail}")
        case AdapterRejected():
            code = "adapter_rejected" if error.final else "adapter_unavailable"
            return ApiError(400, str(error), param="lora_name", code=code)
        case UnknownPolicy():
            param = "model" if request.url.path.endswith(_CHAT) else "lora_name"
            return ApiError(404, str(error), param=param, code="model_not_found")
        case EngineFull():
            return ApiError(429, str(error), code="engine_full")
        case Overloaded():
            return ApiError(503, str(error), code="overloaded")
        case _:
            # The class alone goes to the caller: the message of an error may hold a path or a prompt.
            _log.error("a request failed", exc_info=error)
            return ApiError(500, f"the server failed on this request ({type(error).__name__})")


class ExactRoute:
    """The `/exact` chat route, for scripts that train by hand: each choice carries its exact tokens.

    `POST /exact/v1/chat/completions` differs from `/v1/chat/completions` in two things. First, the model's bare NAME
    stands for the policy that is champion at the moment of the call. Second, each choice of an unstreamed answer has
    the field `art_patch` (`art_patch.trajectories.trainability`). Clients that keep unknown fields, such as the OpenAI
    SDK, hand the tokens to the trainer together with the choice. The usual fields for token ids and log-probabilities
    are filled only if the request asked for them. Streamed answers are passed on unchanged, without exact tokens.
    """

    def __init__(self, chat: ASGIApp, serves: Callable[[str], str | None] | None) -> None:
        """Creates the route before `chat`; `serves` returns the champion of a NAME, or `None`, in a thread."""
        self._chat, self._serves = chat, serves

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one chat-completion request over ASGI."""
        began, started_at = time.perf_counter(), time.time()
        try:
            body = await asgi.Caller(scope, receive, send).body()
        except asgi.Gone:
            return
        asked = parse_object(body)
        # Resolved once and sent on as NAME@STEP: a promotion during the call must not change whose tokens these are.
        sent = {**asked, "model": await self._policy(asked.get("model"))}
        if asked.get("stream"):
            await self._chat(scope, asgi.given(_dump(sent), receive), send)
            return
        answered = _HeldAnswer(send)
        sent |= {"logprobs": True, "return_token_ids": True}
        await self._chat(scope, asgi.given(_dump(sent), receive), answered)
        if answered.body is not None:
            answer = json.loads(answered.body)
            hang(answer, asked, started_at=started_at, duration_ms=(time.perf_counter() - began) * 1000)
            await answered.replace(_dump(answer))

    async def _policy(self, model: Any) -> Any:
        if self._serves is None or not isinstance(model, str) or "@" in model:
            return model
        # In a thread, because it reads the store and the event loop must go on streaming.
        return await asyncio.to_thread(self._serves, model) or model


class _HeldAnswer:
    """Takes the messages that the engine sends: passes errors on, and holds back a whole answer."""

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
        """Sends this body in place of the one that was held back."""
        assert self._start is not None
        # The body has grown, so the length that the engine wrote is wrong.
        headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
