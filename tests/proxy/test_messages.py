"""Anthropic's Messages API through the proxy: to the byte what the provider says, and recorded in chat's terms."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.proxy.claude import ASK, LOOKS, SECRET, TOOL, refused, streamed, whole
from tests.proxy.provider import SSE, Provider, Reply
from tests.support.proxies import Proxy

anthropic = pytest.importorskip("anthropic")


def seen(call: Callable[[Any], Any], url: str, **options: Any) -> Any:
    """What a caller of the SDK sees of a call: its result, or the error with all that it holds."""
    with anthropic.Anthropic(api_key=SECRET, base_url=url, max_retries=0, **options) as client:
        try:
            return call(client)
        except anthropic.APIStatusError as error:
            return type(error), error.status_code, error.body, error.request_id, str(error)
        except Exception as error:  # the SDK hands a stream that breaks off out as its HTTP library's own error
            return type(error), str(error)


def create(client: Any) -> Any:
    answer = client.messages.with_raw_response.create(**ASK, tools=[TOOL], extra_headers={"anthropic-beta": "b1"})
    return answer.http_response.content, answer.headers["request-id"], answer.parse()


def events(client: Any) -> Any:
    with client.messages.create(**ASK, stream=True) as stream:
        return [event.model_dump() for event in stream]


def helper(client: Any) -> Any:
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        return [event.model_dump() for event in stream], stream.get_final_message().model_dump()


def beta(client: Any) -> Any:
    return client.beta.messages.create(**ASK, betas=["b2"]).model_dump()


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        pytest.param(create, whole(LOOKS, "tool_use"), id="whole"),
        pytest.param(beta, whole(LOOKS, "tool_use"), id="beta"),
        pytest.param(events, streamed(LOOKS, "tool_use"), id="stream"),
        pytest.param(helper, streamed(LOOKS, "tool_use"), id="stream helper"),
        pytest.param(create, refused(400, "invalid_request_error"), id="400"),
        pytest.param(events, refused(401, "authentication_error"), id="401"),
        pytest.param(create, refused(429, "rate_limit_error"), id="429"),
        pytest.param(helper, refused(529, "overloaded_error"), id="529"),
        pytest.param(create, Reply(502, [("content-type", "text/html")], b"<html>"), id="html"),
    ],
)
def test_the_sdk_sees_no_difference(call: Callable[[Any], Any], reply: Reply, proxy: Proxy, provider: Provider):
    provider.will(reply, reply)
    there = provider.url.removesuffix("/v1")
    assert seen(call, proxy.url.removesuffix("/v1")) == seen(call, there)
    through, direct = provider.got
    assert (through.method, through.target, through.body) == (direct.method, direct.target, direct.body)
    assert SECRET in str(through.headers)  # in `x-api-key` or `authorization`, as the release of the SDK does it
    own = {"accept-encoding", "connection", "host"}
    assert {(name.lower(), value) for name, value in through.headers if name.lower() not in own} == {
        (name.lower(), value) for name, value in direct.headers if name.lower() not in own
    }
    (call_,) = proxy.calls(1)
    assert (call_.api, call_.policy, call_.requested_model) == ("messages", None, "claude-x")
    named = ("ok", "claude-x") if reply.status == 200 else ("error", None)
    assert (call_.status, call_.answered_by) == named


@pytest.mark.parametrize("reply", [whole(LOOKS, "tool_use"), streamed(LOOKS, "tool_use")], ids=["whole", "stream"])
def test_all_of_a_call_is_recorded(reply: Reply, proxy: Proxy, provider: Provider):
    provider.will(reply)
    picture = base64.b64encode(b"png").decode()
    held = {"type": "base64", "media_type": "image/png", "data": picture}
    result = {"type": "tool_result", "tool_use_id": "toolu_0", "content": [{"type": "text", "text": "blue"}]}
    body = ASK | {
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Which?"}, {"type": "image", "source": held}]},
            {"role": "assistant", "content": [LOOKS[2] | {"id": "toolu_0"}]},
            {"role": "user", "content": [result, result | {"is_error": True}, {"type": "text", "text": "Go on."}]},
        ],
        "tools": [TOOL | {"cache_control": {"type": "ephemeral"}}, {"type": "web_search_20250305", "name": "web"}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_k": 4,
        "metadata": {"user_id": "u"},
        "stream": not isinstance(reply.body, bytes),
    }
    asked = {"x-api-key": SECRET, "anthropic-version": "2023-06-01", "x-art-trajectory-id": f"run-{body['stream']}"}
    status, headers, answer = proxy.ask("POST", "/v1/messages", json.dumps(body), asked)
    assert (status, answer) == (200, reply.body if isinstance(reply.body, bytes) else b"".join(reply.body))
    assert provider.got[0].header("x-api-key") == SECRET
    (call,) = proxy.calls(1)
    assert call.trajectory_id == headers["x-art-trajectory-id"] == asked["x-art-trajectory-id"]

    def look(number: int) -> Any:
        arguments = '{"at": "sky", "n": [1, 2]}'
        return {"id": f"toolu_{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}

    url = f"data:image/png;base64,{picture}"
    assert call.messages == (
        {"role": "system", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Which?"}, {"type": "image_url", "image_url": {"url": url}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [look(0)]},
        {"role": "tool", "tool_call_id": "toolu_0", "content": "blue"},
        {"role": "tool", "tool_call_id": "toolu_0", "content": "blue", "is_error": True},
        {"role": "user", "content": "Go on."},
    )
    function = {"name": "look", "description": "Look somewhere.", "parameters": TOOL["input_schema"]}
    assert call.tools == ({"type": "function", "function": function}, {"type": "web_search_20250305", "name": "web"})
    assert call.params == {
        "max_completion_tokens": 50,
        "temperature": 0.5,
        "top_k": 4,
        "stop": ["END"],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (choice,) = call.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [look(1)],
        "reasoning_content": "The sky?",
    }
    assert (call.prompt_tokens, call.completion_tokens) == (7, 5)


@pytest.mark.parametrize("write", [whole, streamed])
def test_the_turns_of_a_conversation_are_one_trajectory(write: Callable[..., Reply], proxy: Proxy, provider: Provider):
    said = {"type": "text", "text": "Blue."}
    provider.will(write(LOOKS, "tool_use"), write([said]))

    async def converse() -> None:
        client = anthropic.AsyncAnthropic(api_key=SECRET, base_url=proxy.url.removesuffix("/v1"), max_retries=0)
        messages: list[Any] = [{"role": "user", "content": f"Which {write.__name__}?"}]
        for _ in range(2):
            ask = ASK | {"messages": messages, "tools": [TOOL], "system": "Be kind."}
            if write is whole:
                answer = await client.messages.create(**ask)
            else:
                async with client.messages.stream(**ask) as stream:
                    answer = await stream.get_final_message()
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue"}
            # As agents do it: the SDK's own objects.
            messages = [
                *messages,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
        await client.close()

    asyncio.run(converse())
    first, second = proxy.calls(2)
    assert first.trajectory_id == second.trajectory_id
    assert proxy.run(first.trajectory_id).origin == "stitched"
    assert second.choices[0].message == {"role": "assistant", "content": "Blue."}


def test_what_breaks_off_is_an_error(proxy: Proxy, provider: Provider):
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "too much"}}
    told = streamed(LOOKS, cut=4)
    body = [*told.body, f"event: error\ndata: {json.dumps(overloaded)}\n\n".encode()]
    provider.will(streamed(LOOKS, cut=4), Reply(headers=SSE, body=body))
    for _ in range(2):
        there = seen(events, proxy.url.removesuffix("/v1"))
        assert issubclass(there[0], Exception)
    broken, refused_ = proxy.calls(2)
    assert (broken.status, refused_.status) == ("error", "error")
    assert refused_.error == "the server ended the answer: too much"


def test_the_key_is_nowhere_in_the_store(proxy: Proxy, provider: Provider):
    provider.will(whole(LOOKS), refused(401, "authentication_error"))
    for _ in range(2):
        proxy.ask("POST", "/v1/messages", json.dumps(ASK), {"x-api-key": SECRET, "authorization": f"Bearer {SECRET}"})
    proxy.calls(2)
    for file in (file for file in proxy.errors.parent.rglob("*") if file.is_file()):
        assert SECRET.encode() not in file.read_bytes(), file


def test_its_other_addresses_pass_unrecorded(proxy: Proxy, provider: Provider):
    provider.will(Reply(body=b'{"input_tokens": 7}'), whole([{"type": "text", "text": "end"}]))
    with anthropic.Anthropic(api_key=SECRET, base_url=proxy.url.removesuffix("/v1"), max_retries=0) as client:
        assert client.messages.count_tokens(model="claude-x", messages=ASK["messages"]).input_tokens == 7
        client.messages.create(**ASK)
    proxy.calls(1)
