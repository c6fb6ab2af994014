"""Running the proxy: patch this process, listen, serve until told to stop, write what is queued."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from art_patch._lib.http_server import is_loopback, listen, serve, url_of
from art_patch.errors import ConfigError
from art_patch.patching import flush, patch, unpatch
from art_patch.proxy.app import PREFIX, build_app

FLUSH_S = 10.0


def run_proxy(
    upstream: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    drain_s: float = 30.0,
    stop: threading.Event | None = None,
    **settings: Any,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; then finish running requests and write what was recorded.

    Args:
        upstream: the provider's address, as an SDK would be given it.
        host: address to listen on. Beyond loopback a key is required.
        port: 0 takes a free one; `on_ready` tells which.
        key: what callers must send as `x-art-key`.
        on_ready: called with the address for callers, `http://HOST:PORT/v1`, once requests are answered.
        drain_s: how long running requests may take to finish.
        stop: ends the server when set; for callers that run it in a thread.
        settings: as for `patch()`.

    Raises:
        ConfigError: an impossible address or setting, or an address beyond loopback without a key.
        PortInUse: another process listens there.
        KeyboardInterrupt: it was stopped by SIGINT; everything is written.
    """
    with listen(host, port, key=key, what="your provider and your store") as sock:
        _check_upstream(upstream, sock.getsockname()[1])
        patch(**settings)
        try:
            here = url_of(host, sock) + PREFIX
            app = build_app(upstream, key=key, names=(host,) if is_loopback(sock.getsockname()[0]) else None)
            ready = None if on_ready is None else partial(on_ready, here)
            # Uvicorn's log stays silent: it calls an answer an error that breaks off because upstream's did.
            serve(app, sock, drain_s=drain_s, on_ready=ready, stop=stop, keep_alive_s=75, lifespan="on")
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
    if port == own_port and (parts.hostname == "localhost" or is_loopback(parts.hostname)):
        raise ConfigError(
            f"--upstream {upstream} is this proxy itself (is OPENAI_BASE_URL set?); name your provider's address"
        )
