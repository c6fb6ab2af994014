"""The request as the champion gets it, and the client that sends it.

The twin is an ordinary client of the SDK that points at the engine: same class family, own key, no retries. It shares
the user's HTTP connection pool, so event loops, transports and test doubles stay what they are, unless that pool would
add something meant for the provider (a proxy, credentials, headers, cookies, a signing hook); then it gets its own.
Nothing of the user's client but its pool is taken over: no key, no header, no query.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from art_patch.patching.target import Target
from art_patch.recording.reading import ENGINE_PARAMS, PARAMS

if TYPE_CHECKING:
    from openai import Timeout

_KEPT_HEADERS = ("x-stainless-", "____stainless_override_cast_to")
"""What the SDK itself steers by; all other headers are between the app and its provider."""

_EXTRA_FIELDS = PARAMS | ENGINE_PARAMS | {"logprobs", "return_token_ids", "stream_options", "messages", "tools"}
"""What `extra_body` may bring along. Unlike the SDK's own arguments it can hold anything, a key included."""

_HARMLESS_HEADERS = frozenset({"accept", "accept-encoding", "connection", "user-agent"})

_FROM_ENVIRONMENT = ("organization", "project", "admin_api_key", "webhook_secret")
"""What the SDK reads from the environment into every client."""


def localise(options: Any, target: Target, client: Any) -> Any:
    """Return a shallow copy of the request options for the champion; `options` itself is what upstream will get."""
    body: dict[str, Any] = {**options.json_data}
    extra: Any = getattr(options, "extra_json", None)
    if isinstance(extra, Mapping):
        given = cast(Mapping[str, Any], extra)
        body.update({key: value for key, value in given.items() if key in _EXTRA_FIELDS})
    body["model"] = target.champion
    body["logprobs"] = True
    body["return_token_ids"] = True
    changes: dict[str, Any] = {
        "json_data": body,
        "extra_json": None,
        "params": {},
        "headers": _kept_headers(options.headers),
        "max_retries": 0,
        "timeout": _timeout(options, target, client),
        "follow_redirects": False,  # a prompt goes to the address we were told, and nowhere else
    }
    local = copy.copy(options)
    # pydantic's own setter costs more than everything else here; unknown names belong to a newer or older SDK.
    fields = local.__dict__
    fields.update((name, value) for name, value in changes.items() if name in fields)
    return local


def _kept_headers(headers: Any) -> Any:
    if not isinstance(headers, Mapping):
        return headers
    given = cast(Mapping[str, Any], headers)
    return {key: value for key, value in given.items() if key.lower().startswith(_KEPT_HEADERS)}


def _timeout(options: Any, target: Target, client: Any) -> Timeout:
    from openai import NotGiven, Timeout

    own = client.timeout if isinstance(options.timeout, NotGiven) else options.timeout
    patience = getattr(own, "read", own)
    read = min(target.timeout_s, patience) if isinstance(patience, int | float) else target.timeout_s
    return _make_timeout(Timeout, read, min(target.connect_timeout_s, read))


@lru_cache(maxsize=64)
def _make_timeout(kind: Any, read: float, connect: float) -> Any:
    return kind(read, connect=connect)


class _Twin(NamedTuple):
    address: tuple[str | None, str]
    pool: Any
    base_url: Any
    client: Any


class Twins:
    """One twin for each user client and engine address; gone with the client."""

    def __init__(self) -> None:
        """Start with none."""
        self._twins: weakref.WeakKeyDictionary[Any, _Twin] = weakref.WeakKeyDictionary()

    def get(self, client: Any, target: Target, is_async: bool) -> Any:
        """Return the twin of `client` for the target's engine; `None` if the client talks to that engine itself."""
        address = (target.base_url, target.api_key)
        pool, base_url = client._client, client.base_url
        known = self._twins.get(client)
        if known is None or known.address != address or known.pool is not pool or known.base_url is not base_url:
            itself = str(base_url).rstrip("/") == (target.base_url or "").rstrip("/")
            known = _Twin(address, pool, base_url, None if itself else _make_twin(pool, target, is_async))
            self._twins[client] = known
        return known.client


def _make_twin(pool: Any, target: Target, is_async: bool) -> Any:
    import openai
    from openai._base_client import AsyncHttpxClientWrapper, SyncHttpxClientWrapper

    if _is_for_provider_only(pool):
        wrapper: Any = AsyncHttpxClientWrapper if is_async else SyncHttpxClientWrapper
        pool = wrapper(base_url=target.base_url, trust_env=False)
    kind: Any = openai.AsyncOpenAI if is_async else openai.OpenAI
    twin = kind(api_key=target.api_key, base_url=target.base_url, http_client=pool, max_retries=0)
    # The SDK fills these from OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and the like.
    for name in _FROM_ENVIRONMENT:
        if hasattr(twin, name):
            setattr(twin, name, None)
    # Uncompressed, because streams are rewritten as bytes.
    twin._custom_headers = {"Accept-Encoding": "identity"}
    twin._custom_query = {}
    return twin


def _is_for_provider_only(pool: Any) -> bool:
    """Whether the HTTP client adds something to each request, or sends it through a proxy."""
    transport = getattr(pool, "_transport", None)
    return (
        any(mount is not None for mount in getattr(pool, "_mounts", {}).values())
        or type(getattr(transport, "_pool", None)).__name__.endswith("Proxy")
        or getattr(pool, "_auth", None) is not None
        or bool(getattr(pool, "params", None))
        or any(name.lower() not in _HARMLESS_HEADERS for name in pool.headers)
        or bool(pool.event_hooks.get("request"))
        or any(not cookie.domain for cookie in pool.cookies.jar)
    )
