"""The champion answers calls in Anthropic's format, as far as a chat completion can express them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.claude import ASK, LOOKS, SECRET, TOOL, whole
from tests.proxy.provider import Provider
from tests.support.proxies import CHAMPION, Proxy
from tests.support.servers import PROMPT_IDS, Answer, StubServer, chunks, completion

anthropic = pytest.importorskip("anthropic")

USAGE = {"input_tokens": len(PROMPT_IDS), "output_tokens": 3}


@pytest.fixture
def client(routed: Proxy) -> Any:
    with anthropic.Anthropic(api_key=SECRET, base_url=routed.url.removesuffix("/v1"), max_retries=0) as client:
        yield client


def ask_with(client: Any, stream: bool, **more: Any) -> Any:
    if not stream:
        return client.messages.create(**ASK | more)
    with client.messages.stream(**ASK | more) as stream_:
        kinds = [event.type for event in stream_ if event.type.startswith(("message_", "content_block_"))]
        answer = stream_.get_final_message()
    blocks = [kind for kind in kinds if kind.startswith("content_block_")]
    assert kinds == ["message_start", *blocks, "message_delta", "message_stop"]
    assert blocks == [
        *["content_block_start", *["content_block_delta"] * 3, "content_block_stop"] * len(answer.content)
    ]
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(stream: bool, client: Any, routed: Proxy, provider: Provider, engine: StubServer):
    tools = {"tools": [TOOL], "tool_choice": {"type": "auto"}, "system": [{"type": "text", "text": "Be kind."}]}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": f"Look {stream}"}]}]
    first = ask_with(client, stream, messages=messages, **tools)
    assert (first.model, first.role, first.type, first.system_fingerprint) == (
        "claude-x",
        "assistant",
        "message",
        CHAMPION,
    )
    (block,) = first.content
    assert (block.type, block.id, block.name, block.input) == ("tool_use", "call_1", "look", {"at": "sky"})
    assert (first.stop_reason, first.stop_sequence) == ("tool_use", None)
    assert {name: getattr(first.usage, name) for name in USAGE} == USAGE

    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "blue", "is_error": False}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask_with(client, stream, messages=messages, stop_sequences=["END"], extra_body={"temperature": 0.5})
    assert [block.text for block in second.content] == ["Hello there!"]
    assert (second.stop_reason, second.usage.output_tokens) == ("end_turn", 3)

    assert provider.got == []
    asked = engine.seen[1]
    assert SECRET not in str(engine.seen)
    assert asked.path == "/v1/chat/completions"
    fields = ("model", "messages", "max_completion_tokens", "stop", "temperature", "logprobs", "return_token_ids")
    assert [asked.body[field] for field in fields] == [
        CHAMPION,
        [
            {"role": "user", "content": f"Look {stream}"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
        ],
        50,
        ["END"],
        0.5,
        True,
        True,
    ]
    calls = routed.calls(2)
    assert [(call.api, call.policy, call.untrainable, call.fallback) for call in calls] == [
        ("messages", CHAMPION, None, None)
    ] * 2
    assert calls[0].messages[0] == {"role": "system", "content": "Be kind."}


def chat(choice: dict[str, Any]) -> dict[str, Any]:
    body = completion({"model": CHAMPION, "return_token_ids": True, "logprobs": True})
    return body | {"choices": [body["choices"][0] | choice]}


@pytest.mark.parametrize(
    ("choice", "ended"),
    [
        ({"stop_reason": "END"}, ("stop_sequence", "END")),
        ({"stop_reason": 151645}, ("end_turn", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_how_it_ended_is_said(
    stream: bool, choice: dict[str, Any], ended: Any, client: Any, routed: Proxy, engine: StubServer
):
    events = chunks({"model": CHAMPION}, finish=None, done=False)
    last = json.loads(events[-1][6:]) | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"} | choice]}
    events += [f"data: {json.dumps(last)}\n\n".encode(), b"data: [DONE]\n\n"]
    engine.will(Answer(events=events) if stream else Answer(body=json.dumps(chat(choice)).encode()))
    answer = ask_with(client, stream)
    assert answer.content[0].text == "Hello there!"
    assert (answer.stop_reason, answer.stop_sequence) == ended
    routed.calls(1)


PICTURE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue"}


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, {"role": "user", "content": "and?"}]}


@pytest.mark.parametrize(
    "more",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 20}},
        {"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "m"}]},
        {"container": "c1"},
        {"a_field_of_tomorrow": 1},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [TOOL | {"defer_loading": True}]},
        {"tool_choice": {"type": "a_choice_of_tomorrow"}},
        {"system": [PICTURE]},
        {"messages": [*ASK["messages"], {"role": "assistant", "content": "It begins"}]},
        said(PICTURE),
        said(LOOKS[0], role="assistant"),
        said({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}, role="assistant"),
        said(RESULT | {"content": [PICTURE]}),
        said(RESULT | {"is_error": True}),
        said({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}),
        said({"type": "text", "text": "x", "citations": [{"type": "char_location"}]}, role="assistant"),
        said({"type": "text", "text": "x"}, role="a_role_of_tomorrow"),
    ],
    ids=lambda more: json.dumps(more)[:60],
)
def test_what_a_chat_cannot_express_goes_upstream(
    more: dict[str, Any], routed: Proxy, provider: Provider, engine: StubServer
):
    reply = whole(LOOKS)
    provider.will(reply)
    body = json.dumps(ASK | more).encode()
    status, _, answer = routed.ask("POST", "/v1/messages", body, {"x-api-key": SECRET})
    assert (status, answer, engine.seen) == (200, reply.body, [])
    assert provider.got[0].body == body
    (call,) = routed.calls(1)
    assert (call.policy, call.status) == (None, "ok")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "bad",
    [
        Answer(500, b"no"),
        Answer(body=b"<html>"),
        Answer(body=json.dumps(completion({"model": "another"})).encode()),
        Answer(body=json.dumps(chat({"finish_reason": "a_reason_of_tomorrow"})).encode()),
    ],
    ids=["500", "html", "another model", "unknown end"],
)
def test_a_champion_that_fails_is_not_noticed(
    bad: Answer, stream: bool, routed: Proxy, provider: Provider, engine: StubServer
):
    reply = whole(LOOKS)
    engine.will(bad)
    provider.will(reply)
    body = json.dumps(ASK | {"stream": stream}).encode()
    status, headers, answer = routed.ask("POST", "/v1/messages", body, {"x-api-key": SECRET})
    assert (status, answer, headers["request-id"]) == (200, reply.body, "req_1")
    (call,) = routed.calls(1)
    assert (call.policy, call.fallback is None, call.api) == (None, False, "messages")


def test_arguments_that_are_no_json_go_upstream(routed: Proxy, provider: Provider, engine: StubServer):
    broken = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": '}}
    message = {"role": "assistant", "content": None, "tool_calls": [broken]}
    engine.will(Answer(body=json.dumps(chat({"message": message, "finish_reason": "tool_calls"})).encode()))
    provider.will(whole(LOOKS))
    status, _, answer = routed.ask("POST", "/v1/messages", json.dumps(ASK | {"tools": [TOOL]}))
    assert (status, json.loads(answer)["id"]) == (200, "msg_1")
    routed.calls(1)


def test_two_calls_and_a_text_are_blocks_one_after_the_other(client: Any, routed: Proxy, engine: StubServer):
    def delta(**delta: Any) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "finish_reason": None}

    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        named = {"name": more.pop("name")} if more else {}
        begun = {"id": f"c{index}", "type": "function"} if named else {}
        return delta(tool_calls=[{"index": index, "function": {"arguments": arguments, **named}, **begun}])

    parts = [delta(role="assistant", content=""), delta(reasoning_content="Hm."), delta(content="I look.")]
    parts += [call(0, "", name="look"), call(0, '{"at": '), call(0, '"sky"}'), call(1, '{"at": "sea"}', name="look")]
    parts += [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": CHAMPION}
    events = [f"data: {json.dumps(frame | {'choices': [part]})}\n\n".encode() for part in parts]
    engine.will(Answer(events=[*events, b"data: [DONE]\n\n"]))
    with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        seen = [
            (event.type, event.index) for event in stream if event.type in ("content_block_start", "content_block_stop")
        ]
        answer = stream.get_final_message()
    assert seen == [(f"content_block_{kind}", index) for index in range(3) for kind in ("start", "stop")]
    assert [(block.type, getattr(block, "input", None)) for block in answer.content] == [
        ("text", None),
        ("tool_use", {"at": "sky"}),
        ("tool_use", {"at": "sea"}),
    ]
    assert answer.stop_reason == "tool_use"
    (recorded,) = routed.calls(1)
    assert recorded.choices[0].message["reasoning_content"] == "Hm."
