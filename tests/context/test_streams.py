"""Answers that are streamed on by a real web server: calls keep the trajectory they began in, however it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from art_patch.context import bind, span, trajectory
from art_patch.types import Call, SpanInfo, TrajectoryInfo
from tests.support.recordings import Patched, here
from tests.support.sdk_samples import ASK
from tests.support.servers import TEXT, Answer, chunks


@contextmanager
def web_server(app: Starlette) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", loop="asyncio", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


Endpoint = Callable[[Request], Any]


def endpoints(client: Any, async_client: Any) -> dict[str, Endpoint]:
    """Each sends the id of its trajectory first, then what two calls say."""

    @trajectory("decorated async")
    async def decorated_async() -> AsyncIterator[str]:
        yield here() or "?"
        for _ in range(2):
            async for chunk in await async_client.chat.completions.create(**ASK, stream=True):
                yield chunk.choices[0].delta.content or ""

    @trajectory("decorated sync")
    def decorated_sync() -> Iterator[str]:
        yield here() or "?"
        for _ in range(2):
            for chunk in client.chat.completions.create(**ASK, stream=True):
                yield chunk.choices[0].delta.content or ""

    async def plain_async() -> AsyncIterator[str]:
        yield here() or "?"
        for _ in range(2):
            async for chunk in await async_client.chat.completions.create(**ASK, stream=True):
                yield chunk.choices[0].delta.content or ""

    def plain_sync() -> Iterator[str]:
        yield here() or "?"
        for _ in range(2):
            for chunk in client.chat.completions.create(**ASK, stream=True):
                yield chunk.choices[0].delta.content or ""

    async def relayed(run: TrajectoryInfo, *streams: Any) -> AsyncIterator[str]:
        yield run.id
        for stream in streams:
            async for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    def relayed_sync(run: TrajectoryInfo, *streams: Any) -> Iterator[str]:
        yield run.id
        for stream in streams:
            for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    async def of_decorated_async(_: Request) -> StreamingResponse:
        return StreamingResponse(decorated_async())

    def of_decorated_sync(_: Request) -> StreamingResponse:
        return StreamingResponse(decorated_sync())

    async def of_bound_async(_: Request) -> StreamingResponse:
        with trajectory("bound async"):
            return StreamingResponse(bind(plain_async)())

    def of_bound_sync(_: Request) -> StreamingResponse:
        with trajectory("bound sync"):
            return StreamingResponse(bind(plain_sync)())

    async def of_streams_made_inside(_: Request) -> StreamingResponse:
        with trajectory("made inside") as run:
            streams = [await async_client.chat.completions.create(**ASK, stream=True) for _ in range(2)]
        return StreamingResponse(relayed(run, *streams))

    def of_sync_streams_made_inside(_: Request) -> StreamingResponse:
        with trajectory("made inside, sync") as run:
            streams = [client.chat.completions.create(**ASK, stream=True) for _ in range(2)]
        return StreamingResponse(relayed_sync(run, *streams))

    found = [of_decorated_async, of_decorated_sync, of_bound_async, of_bound_sync]
    return {each.__name__: each for each in (*found, of_streams_made_inside, of_sync_streams_made_inside)}


NAMES = tuple(endpoints(None, None))


@pytest.fixture
def web(patched: Patched) -> Iterator[httpx.Client]:
    clients = openai.OpenAI(**patched.client), openai.AsyncOpenAI(**patched.client)
    routes = [Route(f"/{name}", endpoint) for name, endpoint in endpoints(*clients).items()]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await clients[1].close()

    with web_server(Starlette(routes=routes, lifespan=lifespan)) as url, httpx.Client(base_url=url) as browser:
        yield browser
    clients[0].close()


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", NAMES)
def test_calls_inside_a_streamed_answer(patched, web, name):
    ids = set()
    for _ in range(3):
        said = web.get(f"/{name}").text
        assert said.endswith("".join(TEXT) * 2)
        ids.add(said.removesuffix("".join(TEXT) * 2))
    calls = patched.of(Call)
    assert len(ids) == 3
    assert sorted(call.trajectory_id for call in calls) == sorted([*ids, *ids])
    assert {call.status for call in calls} == {"ok"}
    ended = {info.id for info in patched.of(TrajectoryInfo) if info.ended_at is not None}
    assert ended == (set() if "bound" in name else ids)  # the block was over before the first call


@pytest.mark.parametrize("name", NAMES)
def test_the_browser_goes_away(patched, web, name):
    gate = threading.Event()
    patched.upstream.will(Answer(events=chunks(ASK), gate=gate), Answer(events=chunks(ASK), gate=gate))
    with web.stream("GET", f"/{name}") as answer:
        own = next(answer.iter_text())
    gate.set()
    web.get("/nowhere")
    deadline = time.monotonic() + 10
    while not patched.of(Call) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert {info.id for info in patched.of(TrajectoryInfo)} == {own}
    assert {call.trajectory_id for call in patched.of(Call)} == {own}


def test_requests_at_once_stay_apart(patched, web):
    said: list[str] = []
    threads = [threading.Thread(target=lambda n=n: said.append(web.get(f"/{n}").text)) for n in NAMES * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {text.removesuffix("".join(TEXT) * 2) for text in said}
    calls = [call.trajectory_id for call in patched.of(Call)]
    assert len(ids) == len(threads)
    assert sorted(calls) == sorted([*ids, *ids])


def test_generators_that_are_closed_late_or_elsewhere(patched):
    async def run() -> str | None:
        client = openai.AsyncOpenAI(**patched.client)

        @trajectory("late")
        async def answer() -> AsyncIterator[str | None]:
            with span("part"):
                async for _ in await client.chat.completions.create(**ASK, stream=True):
                    yield here()

        async def first(stream: Any) -> str | None:
            return await anext(stream)

        async def close(stream: Any) -> None:
            await stream.aclose()

        elsewhere = answer()
        own = await asyncio.create_task(first(elsewhere))
        await asyncio.create_task(close(elsewhere))
        dropped = answer()
        await asyncio.create_task(first(dropped))
        del dropped
        gc.collect()
        await asyncio.sleep(0.01)
        with trajectory():
            unfinished = answer()  # closed by the loop when it shuts down, inside no trajectory
            await anext(unfinished)
        assert here() is None
        answer.unfinished = unfinished
        return own

    own = asyncio.run(run())
    calls, infos = patched.of(Call), patched.of(TrajectoryInfo)
    assert len({call.trajectory_id for call in calls}) == len(calls) == 3
    assert own in {call.trajectory_id for call in calls}
    assert {info.id for info in infos if info.ended_at is not None} == {call.trajectory_id for call in calls}
    assert {info.trajectory_id for info in patched.of(SpanInfo)} == {call.trajectory_id for call in calls}


# The SDK and httpx leave their generators to the garbage collector, and trio says so; it does without us, too.
@pytest.mark.filterwarnings("ignore:Async generator .(?!art_patch):ResourceWarning")
def test_trio(patched):
    trio = pytest.importorskip("trio", reason="trio is not installed")

    async def agent(client: Any, name: str) -> None:
        with span(name):
            await client.chat.completions.create(**ASK)
            async for _ in await client.chat.completions.create(**ASK, stream=True):
                await trio.sleep(0)
            assert await trio.to_thread.run_sync(here) == here()

    async def run() -> str:
        async with openai.AsyncOpenAI(**patched.client) as client:
            with trajectory() as run:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(agent, client, "a")
                    nursery.start_soon(agent, client, "b")
            return run.id

    own = trio.run(run)
    calls = patched.of(Call)
    spans = {info.id for info in patched.of(SpanInfo)}
    assert {(call.trajectory_id, call.status) for call in calls} == {(own, "ok")}
    assert len(calls) == 4
    assert {call.span_id for call in calls} == spans
    assert len(spans) == 2
