"""Real engines over real HTTP, in a thread; vLLM where `art-patch init vllm` built its environment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from art_patch.policies import read_base_model
from art_patch.serving import EngineClient, Served, VllmEngine, VllmOptions, run_server
from art_patch.serving.vllm.environment import find_vllm
from art_patch.settings import load_settings

ADMIN_KEY = "key-of-whoever-changes-it"


@dataclass
class Running:
    """A server under test and its clients."""

    engine: Any
    url: str
    openai: OpenAI
    client: EngineClient


@contextmanager
def serve(engine: Served, *, ready_s: float = 30, **options: Any) -> Iterator[Running]:
    """Runs a server in a thread until the block ends."""
    stop, ready, urls = threading.Event(), threading.Event(), []
    options = {"admin_key": ADMIN_KEY} | options

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    failed: list[BaseException] = []

    def run() -> None:
        try:
            run_server(engine, port=0, on_ready=on_ready, stop=stop, **options)
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(ready_s)
        if failed:
            raise failed[0]
        key = options.get("api_key")
        with (
            OpenAI(base_url=urls[0] + "/v1", api_key=key or "none", max_retries=0, timeout=60) as openai,
            EngineClient(urls[0], key, admin_key=options["admin_key"]) as client,
        ):
            yield Running(engine, urls[0], openai, client)
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def vllm_python() -> Path:
    """The interpreter of vLLM's environment; skips the test where there is none."""
    settings = load_settings()
    found = find_vllm(settings.vllm_python, settings.environments)
    if found is None:
        pytest.skip("no environment with vLLM: art-patch init vllm")
    return found.python


def make_vllm(base: Path, adapters: Path, home: Path, **options: Any) -> VllmEngine:
    """A vLLM on the CPU, in float32."""
    of_engine = {name: options.pop(name) for name in ("replicas", "ready_timeout_s") if name in options}
    chosen = {"max_model_len": 1024, "dtype": "float32", "threads": 1, **options}
    return VllmEngine(
        VllmOptions(vllm_python(), base, "agent", model_type="qwen3", **chosen),
        read_base_model(base),
        adapters_root=adapters,
        home=home,
        **of_engine,
    )
