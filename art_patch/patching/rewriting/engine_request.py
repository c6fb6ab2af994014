"""Decides which chat completions the engine can answer, makes their requests, and the client that sends them.

The engine client is an ordinary client of the SDK with the engine's address and key, and without retries. It shares the
connection pool of the app's client, so that it runs in the same event loop, over the same transport or test double. It
copies nothing else of the app's client: no key, no header, no query. If the pool would add something that is meant for
the provider (a proxy, credentials, headers, cookies, a hook that signs), the engine client gets a pool of its own.
"""

import asyncio
import copy
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import wrapt

from art_patch.patching.rewriting.response_rewriter import MOST_BYTES, InvalidAnswer
from art_patch.patching.routing.target import Target
from art_patch.trajectories import ENGINE_PARAMS, PARAMS
from art_patch.types import WAIT_HEADER

# These headers steer the SDK. All others are between the app and its provider.
_KEPT_HEADERS = ("x-stainless-", "____stainless_override_cast_to")

# What `extra_body` may pass on to the engine. Unlike the SDK's own arguments it can hold anything, even a key.
_EXTRA_FIELDS = PARAMS | ENGINE_PARAMS | {"logprobs", "return_token_ids", "stream_options", "messages", "tools"}

_HARMLESS_HEADERS = frozenset({"accept", "accept-encoding", "connection", "user-agent"})

# The SDK reads these attributes of every client from the environment.
_FROM_ENVIRONMENT = ("organization", "project", "admin_api_key", "webhook_secret")


def to_engine_request(options: Any, target: Target, client: Any) -> Any:
    """Return a copy of the request options that asks the champion. `options` stays unchanged, for upstream."""
    body: dict[str, Any] = {**options.json_data}
    extra: Any = getattr(options, "extra_json", None)
    if isinstance(extra, Mapping):
        given = cast("Mapping[str, Any]", extra)
        body.update({key: value for key, value in given.items() if key in _EXTRA_FIELDS})
    # Training needs the ids and log-probabilities of the sampled tokens; the response rewriter removes them again.
    body.update(model=target.champion, logprobs=True, return_token_ids=True)
    return redirected(options, target, client, body)


def translated(options: Any, target: Target, client: Any, read: Callable[[dict[str, Any]], Any]) -> Any:
    """Return request options that ask the champion for a chat completion; `read` parses a body of another API."""
    given = merged_body(options)
    asked = read(given)
    body: dict[str, Any] = {"model": target.champion, "messages": list(asked.messages), **asked.params}
    body |= {"logprobs": True, "return_token_ids": True}
    if asked.tools:
        body["tools"] = list(asked.tools)
    if given.get("stream"):
        # The last event of a stream always holds the usage.
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return redirected(options, target, client, body, url="/chat/completions")


def redirected(options: Any, target: Target, client: Any, body: dict[str, Any], *, url: str | None = None) -> Any:
    """Return a copy of the request options that sends `body` to the engine; `url`: another path than in `options`."""
    read_s = patience_s(options, client, target.first_token_timeout_s if body.get("stream") else target.timeout_s)
    fields: dict[str, Any] = {
        **options.__dict__,
        "url": url or options.url.partition("?")[0],
        "json_data": body,
        "params": {},
        # Half of the time is for the wait, the other half for the answer's beginning.
        "headers": {
            **_kept_headers(options.headers),
            WAIT_HEADER: f"{min(read_s, target.first_token_timeout_s) / 2:g}",
        },
        # The SDK's defaults (2 retries, 600 s) would let an engine that hangs block a caller for half an hour.
        "max_retries": 0,
        "timeout": timeout_of(read_s, min(target.connect_timeout_s, read_s)),
    }
    if "extra_json" in fields:
        fields["extra_json"] = None
    return made_of(fields, options)


def made_of(fields: dict[str, Any], like: Any) -> Any:
    """Return an object of the class of `like`, a pydantic model, with these fields."""
    # By hand: `copy.copy` and pydantic's setters cost twice as much as all the rest of a routed request.
    kind: Any = type(like)
    made = kind.__new__(kind)
    put = object.__setattr__  # pydantic's own setter looks each name up among the fields
    put(made, "__dict__", fields)
    put(made, "__pydantic_fields_set__", like.__pydantic_fields_set__.copy())
    put(made, "__pydantic_extra__", like.__pydantic_extra__)
    put(made, "__pydantic_private__", getattr(like, "__pydantic_private__", None))
    return made


def _kept_headers(headers: Any) -> dict[str, Any]:
    given = cast("Mapping[str, Any]", headers if isinstance(headers, Mapping) else {})
    return {key: value for key, value in given.items() if key.lower().startswith(_KEPT_HEADERS)}


def patience_s(options: Any, client: Any, limit_s: float) -> float:
    """Return the seconds to wait for the next bytes: `limit_s`, or the app's own timeout if that is shorter."""
    own = client.timeout if isinstance(options.timeout, sdk().NotGiven) else options.timeout
    read = getattr(own, "read", own)
    return min(limit_s, read) if isinstance(read, int | float) else limit_s


@lru_cache(maxsize=1)
def sdk() -> Any:
    """Return the module `openai`, which is not imported before the first call; an import in each call costs 4 us."""
    import openai

    return openai


@lru_cache(maxsize=64)
def timeout_of(read_s: float, connect_s: float) -> Any:
    """Return the SDK's timeout with these seconds."""
    return sdk().Timeout(read_s, connect=connect_s)


# Base URL and key of an engine.
Address = tuple[str | None, str]


class _Known(NamedTuple):
    address: Address
    pool: Any
    base_url: Any
    client: Any


class EngineClients:
    """Makes one engine client for each client of the app, and keeps it until the app's client is garbage-collected."""

    def __init__(self) -> None:
        self._engine_clients = weakref.WeakKeyDictionary[Any, _Known]()
        self._patterns: dict[bool, tuple[Address, Any]] = {}
        self._pools = weakref.WeakKeyDictionary[Any, tuple[Address, Any]]()
        # The last answer of `is_engine`, because writing an address as text costs a call of the app more than a
        # microsecond, and nearly all calls are those of one client.
        self._compared: tuple[Any, str | None, bool] = (None, None, False)

    def get(self, client: Any, target: Target, is_async: bool) -> Any:
        """Return the engine client for `client`; `None` if the base URL of `client` already is the target's engine."""
        address = (target.base_url, target.api_key)
        pool, base_url = client._client, client.base_url
        known = self._engine_clients.get(client)
        # An app may change `base_url` of a client, or its pool, at any time.
        if known is None or known.address != address or known.pool is not pool or known.base_url is not base_url:
            made = None if self.is_engine(client, target) else self._copy_for(pool, address, is_async)
            known = _Known(address, pool, base_url, made)
            self._engine_clients[client] = known
        return known.client

    def is_engine(self, client: Any, target: Target) -> bool:
        """Return whether the base URL of the app's client is the engine's: its calls are left alone."""
        base_url, engine, same = self._compared
        if base_url is not client.base_url or engine != target.base_url:
            base_url, engine = client.base_url, target.base_url
            same = str(base_url).rstrip("/") == (engine or "").rstrip("/")
            self._compared = (base_url, engine, same)
        return same

    def _copy_for(self, pool: Any, address: Address, is_async: bool) -> Any:
        known = self._patterns.get(is_async)
        if known is None or known[0] != address:
            known = self._patterns[is_async] = (address, _make_engine_client(pool, address, is_async))
            known[1]._client = None  # else the pattern would keep the connections of one app client alive
        # Apps copy their client for a single call (`with_options`), so an engine client is a shallow copy.
        engine_client = copy.copy(known[1])
        chosen = self._own_pool(address, is_async) if _is_for_provider_only(pool) else pool
        engine_client._client = _BoundedClient(chosen)
        return engine_client

    def _own_pool(self, address: Address, is_async: bool) -> Any:
        # The connections of an asynchronous client belong to the event loop that opened them.
        owner = _event_loop() if is_async else self.__class__
        known = self._pools.get(owner)
        if known is None or known[0] != address:
            known = self._pools[owner] = (address, _make_pool(address, is_async))
        return known[1]


def engine_client(target: Target) -> Any:
    """Return a synchronous engine client with its own connection pool, for calls in the background."""
    address = (target.base_url, target.api_key)
    made = _make_engine_client(_make_pool(address, False), address, False)
    made._client = _BoundedClient(made._client)
    return made


def _event_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # an event loop other than asyncio's; a thread runs one at a time
        return threading.current_thread()


def _make_pool(address: Address, is_async: bool) -> Any:
    base = sdk()._base_client
    wrapper = base.AsyncHttpxClientWrapper if is_async else base.SyncHttpxClientWrapper
    # Loading certificates costs 20 ms, in the first call of the app. Plain HTTP needs none.
    tls = str(address[0]).startswith("https")
    return wrapper(base_url=address[0], trust_env=False, limits=sdk()._constants.DEFAULT_CONNECTION_LIMITS, verify=tls)


def _make_engine_client(pool: Any, address: Address, is_async: bool) -> Any:
    kind = sdk().AsyncOpenAI if is_async else sdk().OpenAI
    engine_client = kind(api_key=address[1], base_url=address[0], http_client=pool, max_retries=0)
    for name in _FROM_ENVIRONMENT:
        if hasattr(engine_client, name):
            setattr(engine_client, name, None)
    # Uncompressed, because the bytes of a stream are rewritten.
    engine_client._custom_headers = {"Accept-Encoding": "identity"}
    engine_client._custom_query = {}
    return engine_client


class _BoundedClient(wrapt.ObjectProxy):  # pyright: ignore[reportMissingTypeArgument]
    """An HTTP client that follows no redirect, and refuses an answer before it is read that would fill the memory."""

    # A prompt goes to the engine's address and nowhere else. openai up to 1.66 cannot ask for that in each request.
    def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        sent: Any = self.__wrapped__.send(request, **{**options, "stream": True, "follow_redirects": False})
        if hasattr(sent, "__await__"):
            return self._read_async(sent, stream)
        try:
            _check_size(sent)
            if not stream and not sent.is_stream_consumed:
                body = bytearray()
                for chunk in sent.iter_raw():
                    _add(body, chunk)
                sent._content = bytes(body)  # as `read` would leave it
        except BaseException:
            sent.close()
            raise
        return sent

    async def _read_async(self, sent: Any, stream: bool) -> Any:
        response = await sent
        try:
            _check_size(response)
            if not stream and not response.is_stream_consumed:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    _add(body, chunk)
                response._content = bytes(body)
        except BaseException:
            await response.aclose()
            raise
        return response


def _check_size(response: Any) -> None:
    # 300 kB may unpack to 300 MB, in the process of the app.
    if response.headers.get("content-encoding", "identity") != "identity":
        raise InvalidAnswer("it is compressed, which was not asked for")
    length = response.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MOST_BYTES:
        raise InvalidAnswer(f"it has {length:.20} bytes")


def _add(body: bytearray, chunk: bytes) -> None:
    body += chunk
    if len(body) > MOST_BYTES:  # an answer without a length
        raise InvalidAnswer(f"it has more than {MOST_BYTES} bytes")


def _is_for_provider_only(pool: Any) -> bool:
    """Return whether the HTTP client adds something to each request, or sends it through a proxy."""
    transport, hooks = getattr(pool, "_transport", None), pool.event_hooks.get("request", ())
    return (
        any(mount is not None for mount in getattr(pool, "_mounts", {}).values())
        or type(getattr(transport, "_pool", None)).__name__.endswith("Proxy")
        or getattr(pool, "_auth", None) is not None
        or bool(getattr(pool, "params", None))
        or any(name.lower() not in _HARMLESS_HEADERS for name in pool.headers)
        # The hook that openai 3 gives to Azure's clients only takes the key out of redirects, so it does not count.
        or any(not str(getattr(hook, "__module__", "")).startswith("openai.") for hook in hooks)
        or any(not cookie.domain for cookie in pool.cookies.jar)
    )


RAW_HEADER = "x-stainless-raw-response"

# A local engine does not know these fields, or silently ignores them.
_FOREIGN_FIELDS = ("web_search_options", "audio", "functions", "function_call")

# A body with one of these is looked at closely. Most have none.
_SAYS_MORE = frozenset({*_FOREIGN_FIELDS, "modalities", "store", "tools"})


def why_not_routed(options: Any, stream: bool) -> str | None:
    """Return the reason why the engine cannot answer this chat completion; `None` if it can."""
    body = merged_body(options)
    reason = why_not_carried(options, body, stream)
    if reason is not None:
        return reason
    if not isinstance(body.get("messages"), list):
        return "no messages"
    if _SAYS_MORE.isdisjoint(body):
        return None
    if body.get("store"):
        return "the provider keeps the answer"
    for name in _FOREIGN_FIELDS:
        if body.get(name):
            return f"{name} is the provider's own"
    if "audio" in (body.get("modalities") or ()):
        return "audio"
    for tool in body.get("tools") or ():
        if not isinstance(tool, Mapping) or cast("Mapping[str, Any]", tool).get("type") != "function":
            return "a tool that the provider hosts"
    return None


def merged_body(options: Any) -> dict[str, Any]:
    """Return the request body, with the fields of `extra_body` added."""
    body = cast("dict[str, Any]", options.json_data)
    extra: Any = getattr(options, "extra_json", None)
    return {**body, **cast("Mapping[str, Any]", extra)} if extra and isinstance(extra, Mapping) else body


def why_not_carried(options: Any, body: Mapping[str, Any], stream: bool) -> str | None:
    """Return the reason why a call of any API cannot go to the engine (files, a raw stream, ...); `None` if it can."""
    if bool(body.get("stream")) is not stream:
        return "the body and the SDK disagree about streaming"
    if getattr(options, "files", None) or getattr(options, "content", None):
        return "files"
    if not stream and header(options, RAW_HEADER) == "stream":
        # `with_streaming_response`: the app may read raw bytes, in which a rewritten answer would show.
        return "the answer is handed out unread"
    return None


def header(options: Any, name: str) -> str | None:
    """Return the value of a header of the request options; upper and lower case do not matter."""
    headers: Any = options.headers
    if not headers or not isinstance(headers, Mapping):  # empty, or the SDK's `NotGiven`
        return None
    for key, value in cast("Mapping[str, Any]", headers).items():
        if key.lower() == name:
            return value if isinstance(value, str) else None
    return None
