"""Legacy completions: recorded whole, never routed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types import Completion

from art_patch.patching.sdk.surfaces import surface_of
from art_patch.types import Call, Choice
from tests.support.sdk_samples import UPSTREAM, settled
from tests.support.servers import TEXT, error

ASK: dict[str, Any] = {"model": "gpt-x", "prompt": "hi"}
CALL: Call = replace(
    UPSTREAM,
    api="completions",
    choices=(Choice(0, {"role": "assistant", "content": "".join(TEXT)}, "stop"),),
    untrainable="a completion is not a chat",
)
STREAMED = replace(CALL, prompt_tokens=0, completion_tokens=0)
MODES = pytest.mark.parametrize("mode", ["record", "route"])


@MODES
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_whole(bench, client, make_async, mode, asynchronous):
    async def run() -> Any:
        async with make_async() as client:
            return await client.completions.create(**ASK, temperature=0.5, user="u")

    bench.patch(mode=mode)
    result = asyncio.run(run()) if asynchronous else client.completions.create(**ASK, temperature=0.5, user="u")
    assert type(result) is Completion
    assert result.choices[0].text == "Hello there!"
    assert settled(bench.sink.call) == replace(CALL, params={"temperature": 0.5})
    assert bench.local.seen == []


@MODES
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_streamed(bench, client, make_async, mode, asynchronous):
    async def run() -> Any:
        async with make_async() as client:
            return [chunk async for chunk in await client.completions.create(**ASK, stream=True)]

    bench.patch(mode=mode)
    if asynchronous:
        chunks = asyncio.run(run())
    else:
        stream = client.completions.create(**ASK, stream=True)
        assert type(stream) is openai.Stream
        chunks = list(stream)
    assert {type(chunk) for chunk in chunks} == {Completion}
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello there!"
    call = bench.sink.call
    assert call.ttft_ms is not None
    assert settled(call) == STREAMED
    assert bench.local.seen == []


def test_every_prompt_and_every_choice(bench, client):
    bench.patch()
    client.completions.create(model="gpt-x", prompt=["a", "b"], n=2)
    client.completions.create(
        model="gpt-x", prompt=[1, 2], n=2, stream=True, stream_options={"include_usage": True}
    ).response.read()
    first, second = bench.sink.calls
    assert first.messages == ({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert second.messages == ({"role": "user", "content": [{"type": "token_ids", "token_ids": [1, 2]}]},)
    assert [choice.message["content"] for choice in second.choices] == ["Hello there!"] * 2
    assert (first.completion_tokens, second.completion_tokens) == (12, 6)


def test_other_ways_in(bench, client):
    bench.patch()
    raw = client.completions.with_raw_response.create(**ASK)
    assert raw.parse().choices[0].text == "Hello there!"
    assert type(client.post("/completions", body=ASK, cast_to=Completion)) is Completion
    with client.completions.with_streaming_response.create(**ASK) as response:
        assert b"Hello" in b"".join(response.iter_bytes())
    with client.completions.with_streaming_response.create(**ASK, stream=True) as response:
        assert len([line for line in response.iter_lines() if line]) == 4
    assert [settled(call) for call in bench.sink.calls] == [CALL, CALL, CALL, STREAMED]
    assert bench.local.seen == []


def test_a_stream_left_early(bench, client):
    bench.patch()
    stream = client.completions.create(**ASK, stream=True)
    next(stream)
    stream.close()
    del stream
    call = bench.sink.call
    assert call.status == "abandoned"
    assert call.messages == CALL.messages


def test_provider_errors_pass(bench, client):
    bench.patch()
    bench.upstream.will(error(429, "slow down"))
    with pytest.raises(openai.RateLimitError):
        client.completions.create(**ASK)
    call = bench.sink.call
    assert (call.status, call.api, call.fallback, call.messages) == ("error", "completions", None, CALL.messages)


def test_why_it_is_not_routed(bench):
    class Options:
        url, method, json_data = "/completions", "post", ASK

    surface = surface_of(Options)
    assert surface is not None
    runtime = bench.patch()
    assert surface.why_not_routed(Options, False, runtime.settings) == "a completion prompt is not a chat"
