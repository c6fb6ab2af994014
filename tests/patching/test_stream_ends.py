"""Streams that end in a way which the table in `test_shapes` does not hold: whole, many at once, before they begin."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patching.conftest import CHAMPION
from tests.patching.samples import ASK
from tests.servers import Answer, chunks

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
    (bench.local if mode == "route" else bench.upstream).will(Answer(hang=True))
    bench.patch(mode=mode)

    async def run() -> None:
        async with make_async() as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(**ASK), 0.2)

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
