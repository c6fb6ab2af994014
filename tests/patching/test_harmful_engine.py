"""An engine or provider that is broken, or means harm, costs the app no memory, no time and no call."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from art_patch.patching import status
from art_patch.patching.rewriting import engine_request, response_rewriter
from art_patch.patching.routing.target import is_alive
from art_patch.patching.sdk import stream_tap
from art_patch.types import ENGINE_FULL, Route
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK
from tests.support.servers import Answer, chunks, error

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\nconnection: close\r\n\r\n"


@contextmanager
def raw_engine(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, threading.Event]]:
    """A server that answers each request with bytes of its own; the event says that a caller has hung up on it."""
    hung_up = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            try:
                answer(self.request)
            except OSError:
                hung_up.set()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1", hung_up
        finally:
            server.shutdown()


@pytest.mark.parametrize("header", ["retry-after", "retry-after-ms"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999"])
def test_no_pause_lasts_for_ever(bench, client, header: str, value: str):
    runtime = bench.patch()
    bench.local.will(Answer(429, b"{}", headers={header: value}))
    client.chat.completions.create(**ASK)
    assert bench.sink.call.fallback == ENGINE_FULL
    assert runtime._full_until <= time.monotonic() + 5.0
    runtime._full_until = min(runtime._full_until, time.monotonic())
    assert client.chat.completions.create(**ASK).system_fingerprint == CHAMPION


def test_an_answer_without_a_length_is_not_read_for_ever(bench, client, monkeypatch):
    monkeypatch.setattr(engine_request, "MOST_BYTES", 1 << 20)

    def endless(to: socket.socket) -> None:
        to.sendall(HEAD % b"application/json" + b'{"id": "')
        while True:
            to.sendall(b"x" * 65536)

    with raw_engine(endless) as (url, hung_up):
        bench.route = Route(champion=CHAMPION, base_url=url)
        bench.patch()
        client.chat.completions.create(**ASK)
        assert bench.sink.call.policy is None
        assert "invalid" in (bench.sink.call.fallback or "")
        assert hung_up.wait(20)


@pytest.mark.parametrize("line", [b": nothing\n\n", b"x" * 1000], ids=["comments", "no end of the line"])
@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_without_a_word_is_not_read_for_ever(
    bench, client, make_async, monkeypatch, line: bytes, began: bool, is_async: bool
):
    monkeypatch.setattr(response_rewriter, "MOST_BYTES", 1 << 20)
    first = chunks({**ASK, "model": CHAMPION})[0]

    def endless(to: socket.socket) -> None:
        to.sendall(HEAD % b"text/event-stream" + (first if began else b""))
        while True:
            to.sendall(line * 64)

    with raw_engine(endless) as (url, hung_up):
        bench.route = Route(champion=CHAMPION, base_url=url)
        bench.patch(first_token_timeout_s=20.0, timeout_s=20.0)

        async def ask() -> list[Any]:
            async with make_async() as asynchronous:
                return [each async for each in await asynchronous.chat.completions.create(**ASK, stream=True)]

        assert asyncio.run(ask()) if is_async else list(client.chat.completions.create(**ASK, stream=True))
        assert (bench.sink.call.policy, bench.sink.call.status) == (None, "ok")
        assert hung_up.wait(20)


def test_a_health_check_ends_in_time_whatever_comes():
    """It runs on the recorder's thread, which writes nothing meanwhile."""

    def drips(to: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50:
            to.sendall(bytes([byte]))
            time.sleep(0.05)

    with raw_engine(drips) as (url, hung_up):
        assert not is_alive(url)
        assert hung_up.wait(20), "nobody waited for the end"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_recorded_stream_unpacks_to_a_limit(bench, client, monkeypatch, encoding: str):
    monkeypatch.setattr(stream_tap, "_MOST_BYTES", 1 << 20)
    packers: dict[str, Callable[[bytes], bytes]] = {
        "deflate": zlib.compress,
        "gzip": lambda raw: (packer := zlib.compressobj(wbits=31)).compress(raw) + packer.flush(),
    }
    bench.patch(mode="record")
    events = b"".join(chunks(ASK))
    for size in (0, 2 << 20):
        packed = packers[encoding](events + b":" * size + b"\n\n")
        bench.upstream.will(Answer(events=[packed], headers={"content-encoding": encoding}))
        assert list(client.chat.completions.create(**ASK, stream=True))
    small, large = bench.sink.calls
    assert small.choices[0].message["content"] == "Hello there!"
    assert large.choices == ()


def test_encodings_in_one_another_are_not_unpacked(bench, client):
    bench.patch(mode="record")
    packed = zlib.compress(zlib.compress(b"".join(chunks(ASK))))
    bench.upstream.will(Answer(events=[packed], headers={"content-encoding": "deflate, deflate"}))
    assert list(client.chat.completions.create(**ASK, stream=True))
    assert bench.sink.call.choices == ()


def test_what_the_app_asks_that_no_policy_can_answer_is_counted(bench, client):
    bench.patch()
    said: list[Any] = [{"role": "user", "content": "hi"}]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": "m", "max_tokens": 5, "messages": said, "tools": [hosted]}
    client.post("/messages", body=body, cast_to=object)
    client.chat.completions.create(**ASK, store=True)
    client.chat.completions.create(**ASK)
    assert [call.fallback for call in bench.sink.calls] == [None, None, None], "they are no failures of the engine"
    assert status().fallbacks == 0
    assert status().not_routed == {
        "messages: a tool that the provider hosts": 1,
        "chat: the provider keeps the answer": 1,
    }
    for number in range(200):
        client.chat.completions.create(**ASK, extra_body={"modalities": ["audio"], f"x{number}": 1})
        client.post("/messages", body={**body, "tools": [], f"field{number}": 1}, cast_to=object)
    assert len(status().not_routed) <= 100
    assert sum(status().not_routed.values()) == 402


def test_calls_that_no_policy_was_to_answer_are_not_counted(bench, client):
    bench.patch(mode="record")
    client.chat.completions.create(**ASK, store=True)
    assert status().not_routed == {}


@pytest.mark.parametrize("status_code", [429, 500])
def test_only_failures_open_the_breaker(bench, client, status_code: int):
    runtime = bench.patch()
    bench.local.always = Answer(429, b"{}", headers={"retry-after-ms": "0"}) if status_code == 429 else error(500)
    for _ in range(12):
        client.chat.completions.create(**ASK)
    assert runtime.breaker.closed is (status_code == 429)
