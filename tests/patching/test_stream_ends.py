"""However a stream ends, it leaves exactly one record, with the right status."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.patching.conftest import CHAMPION
from tests.patching.samples import ASK, LOCAL_BODY
from tests.servers import Answer, chunks

MODES = pytest.mark.parametrize("mode", ["record", "route"])


def slow(bench: Any, mode: str) -> Answer:
    """An answer that stops after its first event until the gate is opened."""
    import threading

    answer = Answer(events=chunks(LOCAL_BODY if mode == "route" else ASK), gate=threading.Event())
    (bench.local if mode == "route" else bench.upstream).will(answer)
    bench.patch(mode=mode)
    return answer


def check(bench: Any, mode: str, status: str) -> None:
    call = bench.sink.call
    assert (call.status, call.policy) == (status, CHAMPION if mode == "route" else None)
    assert call.untrainable is not None


@MODES
def test_break_in_with(bench, client, mode):
    answer = slow(bench, mode)
    with client.chat.completions.create(**ASK, stream=True) as stream:
        for _ in stream:
            break
    answer.gate.set()
    check(bench, mode, "abandoned")


@MODES
def test_close(bench, client, mode):
    answer = slow(bench, mode)
    stream = client.chat.completions.create(**ASK, stream=True)
    next(stream)
    stream.close()
    stream.close()
    answer.gate.set()
    check(bench, mode, "abandoned")


@MODES
def test_never_iterated(bench, client, mode):
    answer = slow(bench, mode)
    stream = client.chat.completions.create(**ASK, stream=True)
    answer.gate.set()
    del stream
    gc.collect()
    check(bench, mode, "abandoned")


@MODES
def test_dropped_half_way(bench, client, mode):
    answer = slow(bench, mode)
    stream = client.chat.completions.create(**ASK, stream=True)
    next(stream)
    del stream
    answer.gate.set()
    gc.collect()
    check(bench, mode, "abandoned")


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
def test_task_cancelled(bench, make_async, mode):
    answer = slow(bench, mode)

    async def read(started: asyncio.Event) -> None:
        async with make_async() as client:
            async for _ in await client.chat.completions.create(**ASK, stream=True):
                started.set()

    async def run() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(read(started))
        await started.wait()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    answer.gate.set()
    check(bench, mode, "cancelled")


@MODES
def test_cancelled_before_the_answer_never_falls_back(bench, make_async, mode):
    (bench.local if mode == "route" else bench.upstream).will(Answer(hang=True))
    bench.patch(mode=mode)

    async def run() -> None:
        async with make_async() as client:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(**ASK), 0.2)

    asyncio.run(run())
    check(bench, mode, "cancelled")
    assert len(bench.upstream.seen) + len(bench.local.seen) == 1


@MODES
def test_async_dropped_half_way(bench, make_async, mode):
    answer = slow(bench, mode)

    async def run() -> None:
        async with make_async() as client:
            stream = await client.chat.completions.create(**ASK, stream=True)
            await anext(stream)
            del stream
            gc.collect()
            await asyncio.sleep(0.05)

    asyncio.run(run())
    answer.gate.set()
    check(bench, mode, "abandoned")


@MODES
def test_async_close_in_another_task(bench, make_async, mode):
    answer = slow(bench, mode)

    async def run() -> None:
        async with make_async() as client:
            stream = await client.chat.completions.create(**ASK, stream=True)
            await anext(stream)
            await asyncio.create_task(stream.close())

    asyncio.run(run())
    answer.gate.set()
    check(bench, mode, "abandoned")


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
