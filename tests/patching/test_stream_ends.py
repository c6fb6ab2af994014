"""Streams that end in a way which the table in `test_shapes` does not hold: whole, many at once, before they begin."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from tests.support.patched_sdk import CHAMPION, cancelled_when_seen
from tests.support.sdk_samples import ASK
from tests.support.servers import Answer, chunks

MODES = pytest.mark.parametrize("mode", ["record", "route"])


@MODES
def test_left_at_the_finish_reason_is_whole(bench, client, mode):
    bench.patch(mode=mode)
    with client.chat.completions.create(**ASK, stream=True) as stream:
        for chunk in stream:
            if chunk.choices[0].finish_reason:
                break
    call = bench.sink.call
    assert call.status == "ok"
    assert call.untrainable == (None if mode == "route" else "answered by upstream")


@MODES
def test_cancelled_before_the_answer_never_falls_back(bench, make_async, mode):
    hanging = bench.local if mode == "route" else bench.upstream
    hanging.will(Answer(hang=True))
    bench.patch(mode=mode)

    async def run() -> None:
        async with make_async() as client:
            await cancelled_when_seen(hanging, client.chat.completions.create(**ASK))

    asyncio.run(run())
    call = bench.sink.call
    assert (call.status, call.policy) == ("cancelled", CHAMPION if mode == "route" else None)
    assert call.untrainable is not None
    assert len(bench.upstream.seen) + len(bench.local.seen) == 1


@MODES
def test_many_at_once(bench, make_async, mode):
    bench.patch(mode=mode)

    async def one(client: Any) -> int:
        return len([c async for c in await client.chat.completions.create(**ASK, stream=True)])

    async def run() -> list[int]:
        async with make_async() as client:
            return await asyncio.gather(*(one(client) for _ in range(30)))

    assert asyncio.run(run()) == [5] * 30
    calls = bench.sink.calls
    assert len(calls) == len({call.id for call in calls}) == 30
    assert {call.status for call in calls} == {"ok"}


def test_compressed_upstream_stream_is_read(bench, client):
    import gzip

    body = gzip.compress(b"".join(chunks(ASK)))
    bench.upstream.will(Answer(events=[body[:20], body[20:]], headers={"content-encoding": "gzip"}))
    bench.patch(mode="record")
    assert len(list(client.chat.completions.create(**ASK, stream=True))) == 5
    call = bench.sink.call
    assert call.choices[0].message["content"] == "Hello there!"


@MODES
def test_garbage_is_collected_while_the_pool_is_locked(bench, client, monkeypatch, mode):
    """The collector closes a dropped stream inside a call of the same thread, whose pool's lock is not re-entrant."""
    pool = client._client._transport._pool
    assign = pool._assign_requests_to_connections
    dropped: list[Any] = []
    gate = threading.Event()

    def collect_and_assign() -> Any:
        while dropped:
            dropped.pop()
            gc.collect()
        return assign()

    monkeypatch.setattr(pool, "_assign_requests_to_connections", collect_and_assign)
    bench.patch(mode=mode)
    (bench.local if mode == "route" else bench.upstream).will(Answer(events=chunks(ASK), gate=gate, gate_after=2))
    stream = client.chat.completions.create(**ASK, stream=True)
    next(stream)
    dropped.append(stream)
    del stream
    calling = threading.Thread(target=client.chat.completions.create, kwargs=ASK, daemon=True)
    calling.start()
    calling.join(20)
    assert not calling.is_alive(), "the call waits for itself"
    assert [call.status for call in bench.sink.calls] == ["abandoned", "ok"]
    gate.set()
