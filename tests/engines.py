"""A real engine over real HTTP, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from art_patch.serving.client import EngineClient
from art_patch.serving.embedded.engine import EmbeddedEngine
from art_patch.serving.server import run_server


@dataclass
class Running:
    """A server under test and its clients."""

    engine: EmbeddedEngine
    url: str
    openai: OpenAI
    client: EngineClient


@contextmanager
def serve(engine: EmbeddedEngine, **options: Any) -> Iterator[Running]:
    """Runs a server in a thread until the block ends."""
    stop, ready, urls = threading.Event(), threading.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(
        target=run_server, args=(engine,), kwargs={"port": 0, "on_ready": on_ready, "stop": stop, **options}
    )
    thread.start()
    try:
        assert ready.wait(30)
        key = options.get("api_key")
        with (
            OpenAI(base_url=urls[0] + "/v1", api_key=key or "none", max_retries=0, timeout=60) as openai,
            EngineClient(urls[0], key) as client,
        ):
            yield Running(engine, urls[0], openai, client)
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
