"""A hanging engine does not collect callers: the breaker opens without one of them having to time out."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from art_patch.patching import control, status
from art_patch.patching.routing.target import is_alive
from art_patch.types import Route
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK
from tests.support.servers import Answer


@pytest.fixture
def silent():
    """Takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def url_of(server: socket.socket) -> str:
    return f"http://127.0.0.1:{server.getsockname()[1]}/v1"


def test_the_pulse(bench, silent, monkeypatch):
    monkeypatch.setattr("art_patch.patching.routing.target.TIMEOUT_S", 30.0)
    assert is_alive(bench.local.url)
    monkeypatch.setattr("art_patch.patching.routing.target.TIMEOUT_S", 0.2)
    assert not is_alive(url_of(silent))
    assert not is_alive("http://127.0.0.1:1/v1")
    assert not is_alive("https://127.0.0.1:1/v1")


def until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_new_calls_do_not_join_those_that_wait_for_a_hanging_engine(bench, client, silent, monkeypatch):
    monkeypatch.setattr("art_patch.patching.runtime.HEALTH_CHECK_EVERY_S", 0.05)
    monkeypatch.setattr("art_patch.patching.routing.target.TIMEOUT_S", 0.2)
    bench.route = Route(champion=CHAMPION, base_url=url_of(silent))
    bench.patch(first_token_timeout_s=0.1, timeout_s=300)
    first = threading.Thread(target=lambda: client.chat.completions.create(**ASK))
    first.start()
    until(lambda: not control._process.runtime.breaker.closed)
    assert status().degraded == ("The engine failed repeatedly; calls go upstream until it recovers.",)
    assert client.chat.completions.create(**ASK).choices[0].message.content == "Hello there!"
    assert first.is_alive()
    silent.close()
    first.join(60)
    fallbacks = {call.fallback for call in bench.sink.calls}
    assert fallbacks == {
        "the engine failed repeatedly and is left alone for a moment",
        "the engine cannot be reached",
    }


def test_a_slow_engine_that_is_there_is_left_to_its_work(bench, client, monkeypatch):
    monkeypatch.setattr("art_patch.patching.runtime.HEALTH_CHECK_EVERY_S", 0.02)
    monkeypatch.setattr("art_patch.patching.routing.target.TIMEOUT_S", 30.0)
    bench.local.will(Answer(hang=True))
    bench.patch(first_token_timeout_s=0.05, timeout_s=0.5)
    client.chat.completions.create(**ASK)
    assert control._process.runtime.breaker.closed


def test_an_engine_that_is_back_is_tried_at_once(bench, client, monkeypatch):
    monkeypatch.setattr("art_patch.patching.runtime.HEALTH_CHECK_EVERY_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as dead:
        address = url_of(dead)
    alive = threading.Event()
    monkeypatch.setattr("art_patch.patching.runtime.is_alive", lambda url: alive.is_set())
    bench.route = Route(champion=CHAMPION, base_url=address)
    bench.patch()
    for _ in range(6):
        client.chat.completions.create(**ASK)
    assert not control._process.runtime.breaker.closed
    until(lambda: control._process.runtime._was_dead)
    alive.set()
    until(lambda: not control._process.runtime._was_dead)
    client.chat.completions.create(**ASK)
    reasons = [call.fallback for call in bench.sink.calls]
    assert reasons[-1] == "the engine cannot be reached"  # it was tried, not left alone
    assert not control._process.runtime._waiting
