"""The request as the champion gets it, and the client that sends it.

The engine client is an ordinary client of the SDK that points at the engine: same class family, own key, no retries. It
shares the user's HTTP connection pool, so event loops, transports and test doubles stay what they are, unless that pool
would add something meant for the provider (a proxy, credentials, headers, cookies, a signing hook); then it gets its
own. Nothing of the user's client but its pool is taken over: no key, no header, no query.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from art_patch.patching.routing.target import Target
from art_patch.trajectories import ENGINE_PARAMS, PARAMS

if TYPE_CHECKING:
    from openai import Timeout


_KEPT_HEADERS = ("x-stainless-", "____stainless_override_cast_to")
"""What the SDK itself steers by; all other headers are between the app and its provider."""

_EXTRA_FIELDS = PARAMS | ENGINE_PARAMS | {"logprobs", "return_token_ids", "stream_options", "messages", "tools"}
"""What `extra_body` may bring along. Unlike the SDK's own arguments it can hold anything, a key included."""

_HARMLESS_HEADERS = frozenset({"accept", "accept-encoding", "connection", "user-agent"})

_FROM_ENVIRONMENT = ("organization", "project", "admin_api_key", "webhook_secret")
"""What the SDK reads from the environment into every client."""


def to_engine_request(options: Any, target: Target, client: Any) -> Any:
    """Return a shallow copy of the request options for the champion; `options` itself is what upstream will get."""
    body: dict[str, Any] = {**options.json_data}
    extra: Any = getattr(options, "extra_json", None)
    if isinstance(extra, Mapping):
        given = cast(Mapping[str, Any], extra)
        body.update({key: value for key, value in given.items() if key in _EXTRA_FIELDS})
    body["model"] = target.champion
    body["logprobs"] = True
    body["return_token_ids"] = True
    return redirected(options, target, client, body)


def redirected(options: Any, target: Target, client: Any, body: dict[str, Any], *, url: str | None = None) -> Any:
    """Return a shallow copy of the request options that brings `body` to the champion, by `url` if that is another."""
    fields: dict[str, Any] = {
        **options.__dict__,
        "url": url or options.url.partition("?")[0],
        "json_data": body,
        "params": {},
        "headers": _kept_headers(options.headers),
        "max_retries": 0,
        "timeout": _timeout(options, target, client, bool(body.get("stream"))),
    }
    if "extra_json" in fields:
        fields["extra_json"] = None
    if "follow_redirects" in fields:  # openai 1.66 does not have it; see `_Staying`
        fields["follow_redirects"] = False  # a prompt goes to the address we were told, and nowhere else
    return _made_of(fields, options)


def _made_of(fields: dict[str, Any], like: Any) -> Any:
    """Return an object of the class of `like`, a pydantic model, with these fields.

    By hand, because `copy.copy` and pydantic's setters cost twice as much as all the rest of a local request.
    """
    kind: Any = type(like)
    made = kind.__new__(kind)
    put = object.__setattr__  # pydantic's own looks each name up among its fields
    put(made, "__dict__", fields)
    put(made, "__pydantic_fields_set__", like.__pydantic_fields_set__.copy())
    put(made, "__pydantic_extra__", like.__pydantic_extra__)
    put(made, "__pydantic_private__", getattr(like, "__pydantic_private__", None))
    return made


def _kept_headers(headers: Any) -> Any:
    if not isinstance(headers, Mapping):
        return headers
    given = cast(Mapping[str, Any], headers)
    return {key: value for key, value in given.items() if key.lower().startswith(_KEPT_HEADERS)}


def patience_s(options: Any, client: Any, limit_s: float) -> float:
    """Return how long to wait for the next bytes: `limit_s`, or what the app set for its provider if that is less."""
    own = options.timeout
    if isinstance(own, _sdk().not_given):
        own = client.timeout
    read = getattr(own, "read", own)
    return min(limit_s, read) if isinstance(read, int | float) else limit_s


def _timeout(options: Any, target: Target, client: Any, stream: bool) -> Timeout:
    read = patience_s(options, client, target.first_token_timeout_s if stream else target.timeout_s)
    return _make_timeout(read, min(target.connect_timeout_s, read))


@lru_cache(maxsize=64)
def _make_timeout(read: float, connect: float) -> Any:
    return _sdk().timeout(read, connect=connect)


class _SDK(NamedTuple):
    not_given: Any
    timeout: Any


@lru_cache(maxsize=1)
def _sdk() -> _SDK:
    """What we need of the SDK in each call; importing it there costs 4 us each time."""
    from openai import NotGiven, Timeout

    return _SDK(NotGiven, Timeout)


Address = tuple[str | None, str]
"""Base URL and key of an engine."""


class _Known(NamedTuple):
    address: Address
    pool: Any
    base_url: Any
    client: Any


class EngineClients:
    """One engine client for each user client and engine address; gone with the client.

    Apps make a copy of their client for a single call (`with_options`), so a new engine client is only a shallow copy
    of a pattern, and connections of our own are shared.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._engine_clients: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._patterns: dict[bool, tuple[Address, Any]] = {}
        self._pools: weakref.WeakKeyDictionary[Any, tuple[Address, Any]] = weakref.WeakKeyDictionary()

    def get(self, client: Any, target: Target, is_async: bool) -> Any:
        """Return the client that asks the target's engine; `None` if `client` talks to that engine itself."""
        address = (target.base_url, target.api_key)
        pool, base_url = client._client, client.base_url
        known = self._engine_clients.get(client)
        if known is None or known.address != address or known.pool is not pool or known.base_url is not base_url:
            itself = str(base_url).rstrip("/") == (target.base_url or "").rstrip("/")
            known = _Known(address, pool, base_url, None if itself else self._copy_for(pool, address, is_async))
            self._engine_clients[client] = known
        return known.client

    def _copy_for(self, pool: Any, address: Address, is_async: bool) -> Any:
        known = self._patterns.get(is_async)
        if known is None or known[0] != address:
            known = self._patterns[is_async] = (address, _make_engine_client(pool, address, is_async))
            known[1]._client = None  # a pattern keeps nobody's connections alive
        engine_client = copy.copy(known[1])
        chosen = self._own_pool(address, is_async) if _is_for_provider_only(pool) else pool
        engine_client._client = chosen if _redirects_per_request() else _Staying(chosen)
        return engine_client

    def _own_pool(self, address: Address, is_async: bool) -> Any:
        # The connections of an asynchronous client belong to the event loop that made them.
        owner = _event_loop() if is_async else self.__class__
        known = self._pools.get(owner)
        if known is None or known[0] != address:
            known = self._pools[owner] = (address, _make_pool(address, is_async))
        return known[1]


def engine_client(target: Target) -> Any:
    """Return a synchronous client of the engine with a connection pool of its own."""
    address = (target.base_url, target.api_key)
    return _make_engine_client(_make_pool(address, False), address, False)


def _event_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # another event loop than asyncio's; one thread runs one of them
        return threading.current_thread()


def _make_pool(address: Address, is_async: bool) -> Any:
    from openai._base_client import AsyncHttpxClientWrapper, SyncHttpxClientWrapper
    from openai._constants import DEFAULT_CONNECTION_LIMITS

    wrapper: Any = AsyncHttpxClientWrapper if is_async else SyncHttpxClientWrapper
    # Loading certificates costs 20 ms, in the app's first call.
    tls = str(address[0]).startswith("https")
    return wrapper(base_url=address[0], trust_env=False, limits=DEFAULT_CONNECTION_LIMITS, verify=tls)


def _make_engine_client(pool: Any, address: Address, is_async: bool) -> Any:
    import openai

    kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
    engine_client = kind(api_key=address[1], base_url=address[0], http_client=pool, max_retries=0)
    # The SDK fills these from OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and the like.
    for name in _FROM_ENVIRONMENT:
        if hasattr(engine_client, name):
            setattr(engine_client, name, None)
    # Uncompressed, because streams are rewritten as bytes.
    engine_client._custom_headers = {"Accept-Encoding": "identity"}
    engine_client._custom_query = {}
    return engine_client


class _Staying:
    """An HTTP client that follows no redirect, for an SDK too old to ask for that per request (1.66 is)."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def send(self, request: Any, **options: Any) -> Any:
        return self._pool.send(request, **{**options, "follow_redirects": False})


@lru_cache(maxsize=1)
def _redirects_per_request() -> bool:
    from openai._models import FinalRequestOptions

    return "follow_redirects" in FinalRequestOptions.__annotations__


def _is_for_provider_only(pool: Any) -> bool:
    """Whether the HTTP client adds something to each request, or sends it through a proxy."""
    transport = getattr(pool, "_transport", None)
    return (
        any(mount is not None for mount in getattr(pool, "_mounts", {}).values())
        or type(getattr(transport, "_pool", None)).__name__.endswith("Proxy")
        or getattr(pool, "_auth", None) is not None
        or bool(getattr(pool, "params", None))
        or any(name.lower() not in _HARMLESS_HEADERS for name in pool.headers)
        # openai 3 gives Azure's clients a hook that takes the key out of redirects; it does nothing to our requests.
        or any(not _is_of_the_sdk(hook) for hook in pool.event_hooks.get("request", ()))
        or any(not cookie.domain for cookie in pool.cookies.jar)
    )


def _is_of_the_sdk(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("openai.")


RAW_HEADER = "x-stainless-raw-response"

_FOREIGN_FIELDS = ("web_search_options", "audio", "functions", "function_call")
"""Fields that a local engine does not know or silently ignores."""


def why_not_routed(options: Any, stream: bool) -> str | None:
    """Return why the champion cannot answer this chat completion; `None` if it can."""
    body = merged_body(options)
    reason = why_not_carried(options, body, stream)
    if reason is not None:
        return reason
    if not isinstance(body.get("messages"), list):
        return "no messages"
    if body.get("store"):
        return "the provider keeps the answer"
    for name in _FOREIGN_FIELDS:
        if body.get(name):
            return f"{name} is the provider's own"
    if "audio" in (body.get("modalities") or ()):
        return "audio"
    for tool in body.get("tools") or ():
        if not isinstance(tool, Mapping) or cast(Mapping[str, Any], tool).get("type") != "function":
            return "a tool that the provider hosts"
    return None


def merged_body(options: Any) -> dict[str, Any]:
    """Return the request's body with what `extra_body` adds to it."""
    body = cast(dict[str, Any], options.json_data)
    extra: Any = getattr(options, "extra_json", None)
    return {**body, **cast(Mapping[str, Any], extra)} if isinstance(extra, Mapping) and extra else body


def why_not_carried(options: Any, body: Mapping[str, Any], stream: bool) -> str | None:
    """Return what about the way in which the app asks keeps the call upstream, whatever it asks for."""
    if bool(body.get("stream")) is not stream:
        return "the body and the SDK disagree about streaming"
    if getattr(options, "files", None) or getattr(options, "content", None):
        return "files"
    if not stream and header(options, RAW_HEADER) == "stream":
        return "the answer is handed out unread"  # its bytes could not be given back as if they came from upstream
    return None


def header(options: Any, name: str) -> str | None:
    """Return a header of the request options, whatever its case."""
    headers: Any = options.headers
    if not isinstance(headers, Mapping):  # the SDK's "not given"
        return None
    for key, value in cast(Mapping[str, Any], headers).items():
        if key.lower() == name:
            return value if isinstance(value, str) else None
    return None
