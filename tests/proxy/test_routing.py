"""The same router and recorder as in a patched app, with the OpenAI SDK and others as callers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import openai
import pytest

from tests.proxy.provider import Provider, Reply
from tests.support.proxies import CHAMPION, ENVIRONMENT, KEY, Proxy
from tests.support.servers import Answer, StubServer

ASK: dict[str, Any] = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def client(proxy: Proxy) -> Any:
    with openai.OpenAI(api_key=KEY, base_url=proxy.url, max_retries=0) as client:
        yield client


def test_upstream_answers_the_sdk_and_is_recorded(client: Any, proxy: Proxy, provider: Provider):
    whole = client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == "Hello there!"
    with client.chat.completions.create(**ASK, stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(parts) == "Hello there!"
    calls = proxy.calls(2)
    assert [(call.policy, call.status, call.requested_model) for call in calls] == [(None, "ok", "gpt-x")] * 2
    assert {got.header("authorization") for got in provider.got} == {f"Bearer {KEY}"}


def test_responses_and_completions_are_recorded(client: Any, proxy: Proxy):
    assert client.responses.create(model="gpt-x", input="hi").output_text == "Hello there!"
    assert client.completions.create(model="gpt-x", prompt="hi").choices[0].text == "Hello there!"
    assert [(call.api, call.status, call.policy) for call in proxy.calls(2)] == [
        ("responses", "ok", None),
        ("completions", "ok", None),
    ]


def test_what_is_no_call_leaves_no_record(client: Any, proxy: Proxy, provider: Provider):
    provider.will(Reply(body=b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'))
    assert [model.id for model in client.models.list()] == ["m"]
    provider.will(Reply(body=b'{"object": "list", "data": [], "model": "e"}'))
    client.embeddings.create(model="e", input="x", encoding_format="float")
    client.chat.completions.create(**ASK)
    proxy.calls(1)


def test_the_champion_answers_and_never_sees_the_caller(
    client: Any, routed: Proxy, provider: Provider, engine: StubServer
):
    answer = client.chat.completions.create(**ASK, extra_headers={"x-secret": "s3cret"}, user="u")
    assert (answer.model, answer.system_fingerprint) == ("gpt-x", CHAMPION)
    assert provider.got == []
    (seen,) = engine.seen
    assert seen.body["model"] == CHAMPION
    assert KEY not in str(seen)
    assert "s3cret" not in str(seen)
    assert "intruder" not in str(seen)
    (call,) = routed.calls(1)
    assert (call.policy, call.untrainable, call.fallback) == (CHAMPION, None, None)


def test_a_champion_that_fails_is_not_noticed(client: Any, routed: Proxy, provider: Provider, engine: StubServer):
    engine.will(Answer(500, b"no"), Answer(body=b"<html>"))
    for _ in range(2):
        assert client.chat.completions.create(**ASK).system_fingerprint is None
    assert [json.loads(got.body) for got in provider.got] == [ASK, ASK]
    assert [call.fallback is not None for call in routed.calls(2)] == [True, True]


def test_retries_are_the_callers_alone(proxy: Proxy, provider: Provider):
    provider.will(*[Reply(500, [("retry-after-ms", "1")], b"{}")] * 2)
    with openai.OpenAI(api_key=KEY, base_url=proxy.url, max_retries=2) as client:
        client.chat.completions.create(**ASK)
    assert [got.header("x-stainless-retry-count") for got in provider.got] == ["0", "1", "2"]
    assert [call.status for call in proxy.calls(3)] == ["error", "error", "ok"]


def test_errors_are_the_sdks_own(client: Any, proxy: Proxy, provider: Provider):
    provider.will(Reply(429, [("x-request-id", "r1")], b'{"error": {"message": "slow", "code": "rate_limit"}}'))
    with pytest.raises(openai.RateLimitError) as raised:
        client.chat.completions.create(**ASK)
    assert (raised.value.code, raised.value.request_id) == ("rate_limit", "r1")
    (call,) = proxy.calls(1)
    assert call.status == "error"


def test_many_at_once(proxy: Proxy, provider: Provider):
    async def ask_all() -> None:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=proxy.url, max_retries=0) as client:
            asks = (client.chat.completions.create(**ASK, user=str(number)) for number in range(100))
            for answer in await asyncio.gather(*asks):
                assert answer.choices[0].message.content == "Hello there!"

    asyncio.run(ask_all())
    assert sorted(int(json.loads(got.body)["user"]) for got in provider.got) == list(range(100))
    proxy.calls(100)


def litellm(script: str, url: str) -> str:
    """Run a line of litellm in a process of its own; return what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, litellm; url = sys.argv[1]; {script}", url],
        env=ENVIRONMENT | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.slow
def test_litellms_own_transport_is_recorded(proxy: Proxy):
    ask = 'messages=[{"role": "user", "content": "hi"}], api_base=url, api_key="sk-x"'
    said = litellm(f'print(litellm.completion("hosted_vllm/m1", {ask}).choices[0].message.content)', proxy.url)
    assert said == "Hello there!"
    (call,) = proxy.calls(1)
    assert (call.api, call.requested_model, call.status) == ("chat", "m1", "ok")


@pytest.mark.slow
def test_litellms_responses_are_recorded(proxy: Proxy):
    pytest.importorskip("mcp", reason="litellm.responses() imports it")
    said = litellm('print(litellm.responses("hi", "openai/m2", api_base=url, api_key="sk-x").output_text)', proxy.url)
    assert said == "Hello there!"
    (call,) = proxy.calls(1)
    assert (call.api, call.requested_model, call.status) == ("responses", "m2", "ok")
