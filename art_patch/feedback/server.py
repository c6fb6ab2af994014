"""Running the feedback server: open the store, listen, say where, serve until told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from art_patch._lib.http_server import listen, serve, url_of
from art_patch.errors import ConfigError
from art_patch.feedback.app import build_app
from art_patch.feedback.links import say_address, secret_of
from art_patch.settings import Settings
from art_patch.store import open_store


def run_feedback(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str | None = None,
    on_ready: Callable[[str], None] | None = None,
    drain_s: float = 5.0,
    stop: threading.Event | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or `stop`.

    Args:
        settings: the store, the secret, what is redacted.
        host: address to listen on. Beyond loopback, too: every request must show a signed link.
        port: 0 takes a free one; `on_ready` tells which.
        advertise: address that people reach it by, where that is another: a name, a proxy with TLS.
        on_ready: called with that address once requests are answered.
        drain_s: how long running requests may take to finish.
        stop: ends the server when set; for callers that run it in a thread.

    Raises:
        ConfigError: an impossible address, or a key that cannot be read.
        PortInUse: another process listens there.
        StoreError: the store cannot be opened.
        KeyboardInterrupt: it was stopped by SIGINT.
    """
    if advertise is not None and not advertise.startswith(("http://", "https://")):
        raise ConfigError(f"--advertise {advertise} is not an address; write it like https://feedback.example.com")
    secret = secret_of(settings)
    with listen(host, port, key=secret.decode(), what="your store") as sock:
        here = (advertise or settings.feedback_base_url or url_of(host, sock)).rstrip("/")
        store = open_store(settings.store_url, project=settings.project)
        try:
            app = build_app(store, secret=secret, project=settings.project, redact=settings.redact)

            def ready() -> None:
                say_address(settings, here)
                if on_ready is not None:
                    on_ready(here)

            serve(app, sock, drain_s=drain_s, on_ready=ready, stop=stop)
        finally:
            store.close()
