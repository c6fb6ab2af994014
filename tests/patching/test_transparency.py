"""What a call leaves in its record, field by field, and what is sent where. The ways to call are in `test_shapes`."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK, LOCAL, MESSAGES, TOOLS, UPSTREAM, settled, streamed
from tests.support.servers import TOOL_CALL


def test_recorded_upstream(bench, client):
    bench.patch(mode="record")
    result = client.chat.completions.create(**ASK, temperature=0.5, user="u", metadata={"a": "b"})
    assert type(result) is ChatCompletion
    assert result.choices[0].message.content == "Hello there!"
    assert settled(bench.sink.call) == replace(UPSTREAM, params={"temperature": 0.5})
    assert bench.local.seen == []


def test_routed(bench, client):
    bench.patch()
    result = client.chat.completions.create(**ASK, temperature=0.5)
    assert type(result) is ChatCompletion
    assert result.model == "gpt-x"
    assert result.system_fingerprint == CHAMPION
    assert result.choices[0].logprobs is None
    assert "token_ids" not in str(result.model_dump())
    assert settled(bench.sink.call) == replace(LOCAL, params={"temperature": 0.5})
    assert bench.upstream.seen == []
    (seen,) = bench.local.seen
    assert seen.body == ASK | {"model": CHAMPION, "temperature": 0.5, "logprobs": True, "return_token_ids": True}


@pytest.mark.parametrize("mode", ["record", "route"])
def test_streamed(bench, client, mode):
    plain = list(client.chat.completions.create(**ASK, stream=True))
    bench.patch(mode=mode)
    stream = client.chat.completions.create(**ASK, stream=True)
    assert type(stream) is openai.Stream
    assert stream._client is client
    ours = list(stream)
    assert {type(chunk) for chunk in ours} == {ChatCompletionChunk}
    for chunk in ours:
        assert chunk.system_fingerprint == (CHAMPION if mode == "route" else None)
        chunk.system_fingerprint = None
    assert [c.model_dump(exclude_unset=False) for c in ours] == [c.model_dump(exclude_unset=False) for c in plain]
    call = bench.sink.call
    assert call.ttft_ms is not None
    expected = streamed(LOCAL if mode == "route" else replace(UPSTREAM, prompt_tokens=0, completion_tokens=0))
    assert settled(call) == expected


@pytest.mark.parametrize("mode", ["record", "route"])
@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_n(bench, client, mode, stream):
    bench.patch(mode=mode)
    result = client.chat.completions.create(**ASK, tools=TOOLS, n=2, stream=stream)
    if stream:
        list(result)
    else:
        assert [choice.message.tool_calls[0].function.name for choice in result.choices] == ["look", "look"]
    call = bench.sink.call
    assert call.tools == tuple(TOOLS)
    assert call.params == {"n": 2}
    assert [choice.message["tool_calls"] for choice in call.choices] == [[TOOL_CALL], [TOOL_CALL]]
    assert [choice.finish_reason for choice in call.choices] == ["tool_calls", "tool_calls"]
    if mode == "route":
        assert [choice.token_ids for choice in call.choices] == [(10, 11, 12), (11, 11, 12)]
        assert call.untrainable is None


def test_logprobs_that_were_asked_for_stay(bench, client):
    bench.patch()
    result = client.chat.completions.create(**ASK, logprobs=True)
    assert [token.logprob for token in result.choices[0].logprobs.content] == [-0.25] * 3
    chunks = list(client.chat.completions.create(**ASK, logprobs=True, stream=True))
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices and c.choices[0].logprobs) == 3
    assert [call.params for call in bench.sink.calls] == [{"logprobs": True}] * 2


@pytest.mark.parametrize(
    "more",
    [
        {"store": True},
        {"web_search_options": {}, "extra_body": {"web_search_options": {"search_context_size": "low"}}},
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
        {"functions": [{"name": "f"}]},
    ],
)
def test_what_only_the_provider_can_do_is_not_routed(bench, client, more):
    bench.patch()
    client.chat.completions.create(**ASK, **more)
    assert bench.local.seen == []
    call = bench.sink.call
    assert (call.policy, call.fallback) == (None, None)


def test_options_are_not_changed(bench, client):
    bench.patch()
    extra = {"top_k": 5, "api_key": "sk-canary"}
    messages = [dict(MESSAGES[0])]
    client.chat.completions.create(model="gpt-x", messages=messages, extra_body=extra, extra_headers={"X-A": "b"})
    assert extra == {"top_k": 5, "api_key": "sk-canary"}
    assert messages == MESSAGES
    call = bench.sink.call
    assert call.params == {"top_k": 5}
    assert call.untrainable == "top_k cuts the distribution"


def test_off(bench, client):
    bench.patch(mode="off")
    client.chat.completions.create(**ASK)
    assert bench.sink.calls == []
