"""The champion's own deadlines: a stream that does not begin goes upstream, one that pauses midway is left alone."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import openai
import pytest

from art_patch.patching import status
from art_patch.patching.rewriting.response_rewriter import TooSlow
from art_patch.patching.sdk.first_byte_watch import watch
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK, LOCAL_BODY
from tests.support.servers import Answer, chunks

EVENTS = chunks(LOCAL_BODY | {"stream": True})


def read(bench: Any, client: Any) -> str:
    return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**ASK, stream=True))


def read_async(make_async: Any) -> str:
    async def run() -> str:
        async with make_async() as client:
            stream = await client.chat.completions.create(**ASK, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    return asyncio.run(run())


@pytest.fixture(params=["sync", "async"])
def ask(request, bench, client, make_async):
    return (lambda: read(bench, client)) if request.param == "sync" else (lambda: read_async(make_async))


HANGS: dict[str, list[bytes] | None] = {
    "no headers": None,
    "headers and no event": [b": wait\n\n", *EVENTS],
    "half an event": [EVENTS[0][:20], EVENTS[0][20:], *EVENTS[1:]],
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_stream_that_does_not_begin_goes_upstream(bench, ask, hang):
    events, gate = HANGS[hang], threading.Event()
    bench.local.will(Answer(hang=True) if events is None else Answer(events=events, gate=gate))
    bench.patch(first_token_timeout_s=0.2, timeout_s=30)
    assert ask() == "Hello there!"
    gate.set()
    call = bench.sink.call
    assert (call.policy, call.fallback) == (None, "the engine did not answer in time")
    assert len(bench.upstream.seen) == 1


def test_a_stream_that_pauses_after_it_began_is_the_champions(bench, ask):
    gate = threading.Event()
    bench.local.will(Answer(events=EVENTS, gate=gate, gate_after=2))
    bench.patch(first_token_timeout_s=1.0, timeout_s=30)
    threading.Timer(1.5, gate.set).start()
    assert ask() == "Hello there!"
    call = bench.sink.call
    assert (call.policy, call.fallback, call.status) == (CHAMPION, None, "ok")


def test_a_pause_that_is_too_long_is_the_sdks_own_timeout(bench, client):
    gate = threading.Event()
    bench.local.will(Answer(events=EVENTS, gate=gate, gate_after=2))
    bench.patch(first_token_timeout_s=30, timeout_s=1.0)
    with pytest.raises(openai.APITimeoutError):
        read(bench, client)
    gate.set()
    assert bench.sink.call.status == "error"


def test_the_apps_own_patience_counts_if_it_is_less(bench, client):
    bench.local.will(Answer(hang=True))
    bench.patch(first_token_timeout_s=60)
    assert read(bench, client.with_options(timeout=1.5)) == "Hello there!"
    assert bench.sink.call.fallback == "the engine did not answer in time"


def test_many_streams_at_once_are_watched_by_one_thread(bench, client):
    bench.local.always = Answer(hang=True)
    bench.patch(first_token_timeout_s=0.3)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(read(bench, client))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == ["Hello there!"] * 8
    assert sum(t.name == "art_patch-watch" for t in threading.enumerate()) <= 1
    assert len(bench.sink.calls) == 8
    assert status().degraded == ("The engine failed repeatedly; calls go upstream until it recovers.",)


def test_the_watch_forgets_what_has_begun(bench, client):
    bench.patch(first_token_timeout_s=0.2)
    for _ in range(5):
        assert read(bench, client) == "Hello there!"
    deadline = time.monotonic() + 10
    while watch._waits and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not watch._waits


class Open:
    """Stands in for a response whose body has not begun."""

    def __init__(self, ours: socket.socket) -> None:
        self.extensions = {"network_stream": self}
        self._socket = ours

    def get_extra_info(self, _: str) -> socket.socket:
        return self._socket


def test_the_watch_goes_to_sleep_and_wakes_again(monkeypatch):
    monkeypatch.setattr("art_patch.patching.sdk.first_byte_watch.AWAKE_S", 0.1)
    for _ in range(3):
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(TooSlow), watch.wait_for(Open(ours), 0.05):
            ours.settimeout(30)
            assert ours.recv(1) == b""  # shut by the watch
        deadline = time.monotonic() + 10
        while watch._wake.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not watch._wake.is_set()
