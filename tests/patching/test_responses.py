"""The Responses API: always recorded, routed as a chat completion where nothing is lost, a genuine `Response`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from art_patch.patching.rewriting import responses_request
from art_patch.patching.rewriting.response_rewriter import InvalidAnswer
from art_patch.patching.rewriting.responses_rewriter import ResponsesRewriter
from art_patch.patching.sdk.surfaces import surface_of
from art_patch.recording import responses
from art_patch.recording.chat import events as sse_events
from art_patch.recording.chat import read_chat_request
from art_patch.settings import Settings
from art_patch.types import Route
from tests.support.patched_sdk import CHAMPION, cancelled_when_seen
from tests.support.responses import OBJECT
from tests.support.sdk_samples import LOCAL as CHAT_LOCAL
from tests.support.sdk_samples import LOCAL_BODY, MESSAGES, SAID, TOOLS, UPSTREAM, settled, streamed
from tests.support.servers import (
    RESPONSE_CALL,
    TOOL_CALL,
    Answer,
    chunks,
    completion,
    error,
    response,
    response_events,
)

ASK: dict[str, Any] = {"model": "gpt-x", "input": "hi", "store": False}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
LOCAL = replace(CHAT_LOCAL, api="responses")
RECORDED = replace(UPSTREAM, api="responses", choices=(replace(UPSTREAM.choices[0], message=SAID),))
MODES = pytest.mark.parametrize("mode", ["record", "route"])
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def needs(client: Any, method: str) -> None:
    if not hasattr(client.responses, method):
        pytest.skip(f"openai {openai.__version__} has no responses.{method}")


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def plain(events: list[Any]) -> list[Any]:
    """The events as JSON without what differs from answer to answer."""

    def without_ids(value: Any) -> Any:
        if isinstance(value, list):
            return [without_ids(item) for item in value]
        if isinstance(value, dict):
            return {
                key: "ID" if key in ("id", "item_id") else without_ids(item)
                for key, item in value.items()
                if key not in _ONLY_ONE_TELLS
            }
        return value

    return [without_ids(event.model_dump(mode="json", exclude_unset=True)) for event in events]


_ONLY_ONE_TELLS = (
    *("background", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "service_tier", "store", "system_fingerprint", "temperature", "top_logprobs"),
    *("top_p", "truncation", "user"),
)


# Results and records.


def test_recorded_upstream(bench, client):
    bench.patch(mode="record")
    result = client.responses.create(**ASK, temperature=0.5, user="u", metadata={"a": "b"})
    assert type(result) is Response
    assert result.output_text == "Hello there!"
    assert settled(bench.sink.call) == replace(RECORDED, params={"temperature": 0.5})
    assert bench.local.seen == []


def test_routed(bench, client):
    bench.patch()
    result = client.responses.create(
        **ASK, instructions="be kind", temperature=0.5, max_output_tokens=9, metadata={"a": "b"}, user="u"
    )
    assert type(result) is Response
    assert (result.model, result.status, result.error, result.incomplete_details) == ("gpt-x", "completed", None, None)
    assert result.output_text == "Hello there!"
    assert (result.instructions, result.temperature, result.max_output_tokens) == ("be kind", 0.5, 9)
    assert (result.metadata, result.parallel_tool_calls, result.tool_choice, result.tools) == (
        {"a": "b"},
        True,
        "auto",
        [],
    )
    assert result.system_fingerprint == CHAMPION
    assert result.id.startswith("resp_")
    (item,) = result.output
    assert item.id.startswith("msg_")
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.total_tokens) == (3, 3, 6)
    assert "token_ids" not in str(result.model_dump())
    messages = [{"role": "system", "content": "be kind"}, *MESSAGES]
    params = {"temperature": 0.5, "max_completion_tokens": 9}
    assert settled(bench.sink.call) == replace(LOCAL, messages=tuple(messages), params=params)
    assert bench.upstream.seen == []
    (seen,) = bench.local.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.body == LOCAL_BODY | {"messages": messages} | params
    assert "sk-upstream-secret" not in str(seen)


@MODES
def test_streamed(bench, client, mode):
    unpatched = list(client.responses.create(**ASK, stream=True))
    bench.patch(mode=mode)
    stream = client.responses.create(**ASK, stream=True)
    assert type(stream) is openai.Stream
    assert stream._client is client
    ours = list(stream)
    assert [type(event) for event in ours] == [type(event) for event in unpatched]
    assert [event.sequence_number for event in ours] == list(range(len(ours)))
    assert plain(ours) == plain(unpatched)
    call = bench.sink.call
    assert call.ttft_ms is not None
    assert settled(call) == (streamed(LOCAL) if mode == "route" else RECORDED)
    if mode == "route":
        assert ours[-1].response.system_fingerprint == CHAMPION
        assert bench.local.seen[0].body["stream_options"] == {"include_usage": True}


@MODES
@pytest.mark.parametrize("stream", [False, True])
def test_asynchronous(bench, make_async, mode, stream):
    async def run() -> Any:
        async with make_async() as client:
            result = await client.responses.create(**ASK, stream=stream)
            return text_of([event async for event in result]) if stream else result.output_text

    bench.patch(mode=mode)
    assert asyncio.run(run()) == "Hello there!"
    expected = RECORDED if mode == "record" else streamed(LOCAL) if stream else LOCAL
    assert settled(bench.sink.call) == expected


@MODES
@pytest.mark.parametrize("stream", [False, True])
def test_tools(bench, client, mode, stream):
    unpatched = client.responses.create(**ASK, tools=[LOOK], stream=stream)
    unpatched = plain(list(unpatched)) if stream else None
    bench.patch(mode=mode)
    result = client.responses.create(**ASK, tools=[LOOK], tool_choice="auto", stream=stream)
    if stream:
        events = list(result)
        assert [event["type"] for event in plain(events)] == [event["type"] for event in unpatched]
        result = events[-1].response
    (called,) = result.output
    assert (called.type, called.call_id, called.name) == ("function_call", "call_1", "look")
    assert json.loads(called.arguments) == {"at": "sky"}
    assert called.id.startswith("fc_")
    call = bench.sink.call
    assert call.tools == tuple(TOOLS)
    assert call.params == {"tool_choice": "auto"}
    (choice,) = call.choices
    assert (choice.message["tool_calls"], choice.finish_reason) == ([TOOL_CALL], "tool_calls")
    assert call.untrainable == (None if mode == "route" else "answered by upstream")


@MODES
def test_a_conversation_with_tools_is_one_trajectory(bench, client, mode):
    bench.patch(mode=mode)
    said: list[Any] = [{"role": "user", "content": "what colour?"}]
    first = client.responses.create(model="gpt-x", input=said, store=False, tools=[LOOK])
    said += first.output  # as the SDK's documentation does it
    said.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "blue"})
    second = client.responses.create(model="gpt-x", input=said, store=False)
    said += second.output
    said.append({"role": "user", "content": "sure?"})
    client.responses.create(model="gpt-x", input=said, store=False)
    calls = bench.sink.calls
    assert len({call.trajectory_id for call in calls}) == 1
    assert [call.policy for call in calls] == [CHAMPION if mode == "route" else None] * 3
    assert [{key: value for key, value in message.items() if value is not None} for message in calls[2].messages] == [
        {"role": "user", "content": "what colour?"},
        {"role": "assistant", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
        SAID,
        {"role": "user", "content": "sure?"},
    ]


def test_a_conversation_goes_on_upstream(bench, client):
    """The engine dies after the first turn; the provider gets the turn in its own words."""
    bench.patch()
    said: list[Any] = [{"role": "user", "content": "hi"}]
    said += client.responses.create(model="gpt-x", input=said, store=False).output
    bench.local.always = error(500)
    said.append({"role": "user", "content": "and?"})
    client.responses.create(model="gpt-x", input=said, store=False)
    first, second = bench.sink.calls
    assert (first.policy, second.policy, second.fallback) == (CHAMPION, None, "the engine answered HTTP 500: no")
    assert first.trajectory_id == second.trajectory_id
    (seen,) = bench.upstream.seen
    assert [item["role"] for item in seen.body["input"]] == ["user", "assistant", "user"]
    assert seen.body["input"][1]["content"][0]["text"] == "Hello there!"


@MODES
@BOTH
def test_parse(bench, client, make_async, mode, asynchronous):
    from pydantic import BaseModel

    class Sky(BaseModel):
        colour: str

    async def run() -> Any:
        async with make_async() as client:
            return await client.responses.parse(**ASK, text_format=Sky)

    needs(client, "parse")
    bench.patch(mode=mode)
    blue = '{"colour": "b"}'
    bench.local.will(Answer(body=json.dumps(completion(LOCAL_BODY, content=blue)).encode()))
    part = {"type": "output_text", "text": blue, "annotations": []}
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    bench.upstream.will(Answer(body=json.dumps(response(ASK, output=[item])).encode()))
    parsed = asyncio.run(run()) if asynchronous else client.responses.parse(**ASK, text_format=Sky)
    assert parsed.output_parsed == Sky(colour="b")
    call = bench.sink.call
    schema = call.params["response_format"]
    assert (schema["type"], schema["json_schema"]["name"], schema["json_schema"]["strict"]) == (
        "json_schema",
        "Sky",
        True,
    )
    assert call.policy == (CHAMPION if mode == "route" else None)


def test_an_answer_that_parse_does_not_like_goes_upstream(bench, client):
    from pydantic import BaseModel

    class Sky(BaseModel):
        colour: str

    needs(client, "parse")
    bench.patch()
    part = {"type": "output_text", "text": '{"colour": "b"}', "annotations": []}
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    bench.upstream.will(Answer(body=json.dumps(response(ASK, output=[item])).encode()))
    assert client.responses.parse(**ASK, text_format=Sky).output_parsed == Sky(colour="b")
    call = bench.sink.call
    assert (call.policy, call.fallback) == (None, "the SDK cannot read the engine's answer (ValidationError)")


@MODES
@BOTH
@pytest.mark.parametrize("tools", [[], [LOOK]], ids=["text", "tools"])
def test_stream_helper(bench, client, make_async, mode, asynchronous, tools):
    async def run() -> Any:
        async with make_async() as client, client.responses.stream(**ASK, tools=tools) as stream:
            return [event.type async for event in stream], await stream.get_final_response()

    needs(client, "stream")
    bench.patch(mode=mode)
    if asynchronous:
        kinds, final = asyncio.run(run())
    else:
        with client.responses.stream(**ASK, tools=tools) as stream:
            kinds, final = [event.type for event in stream], stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    if tools:
        assert "response.function_call_arguments.delta" in kinds
        assert final.output[0].arguments == RESPONSE_CALL["arguments"]
    else:
        assert final.output_text == "Hello there!"
    assert bench.sink.call.policy == (CHAMPION if mode == "route" else None)


@MODES
def test_raw_response(bench, client, mode):
    unpatched = client.responses.with_raw_response.create(**ASK)
    bench.patch(mode=mode)
    raw = client.responses.with_raw_response.create(**ASK)
    assert type(raw) is type(unpatched)
    assert raw.status_code == 200
    assert int(raw.headers["content-length"]) == len(raw.content)
    assert raw.parse() is raw.parse()
    assert raw.parse().output_text == "Hello there!"
    raw_stream = client.responses.with_raw_response.create(**ASK, stream=True)
    assert text_of(list(raw_stream.parse())) == "Hello there!"
    expected = [LOCAL, streamed(LOCAL)] if mode == "route" else [RECORDED, RECORDED]
    assert [settled(call) for call in bench.sink.calls] == expected


def test_streaming_response_is_recorded_and_streams_are_routed(bench, client):
    bench.patch()
    with client.responses.with_streaming_response.create(**ASK) as answer:
        assert b"Hello" in b"".join(answer.iter_bytes())
    with client.responses.with_streaming_response.create(**ASK, stream=True) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[0] == "event: response.created"
    assert lines[-2] == "event: response.completed"
    assert not any("token_ids" in line for line in lines)
    assert [settled(call) for call in bench.sink.calls] == [RECORDED, streamed(LOCAL)]


def test_other_ways_in(bench, client):
    bench.patch()
    assert type(client.post("/responses", body=ASK, cast_to=Response)) is Response
    assert client.with_options(timeout=3).responses.create(**ASK).output_text == "Hello there!"
    client.post("/responses?beta=true", body=ASK, cast_to=Response)
    azure = openai.AzureOpenAI(api_key="azure-secret", azure_endpoint=bench.upstream.url, api_version="2025-03-01")
    with azure:
        assert type(azure.responses.create(**ASK)) is Response
    assert [call.policy for call in bench.sink.calls] == [CHAMPION] * 4
    assert {seen.path for seen in bench.local.seen} == {"/v1/chat/completions"}
    assert "azure-secret" not in "".join(map(str, bench.local.seen))


@pytest.mark.parametrize("stream", [False, True])
def test_beta(bench, client, stream):
    if not hasattr(client.beta, "responses"):
        pytest.skip(f"openai {openai.__version__} has no beta.responses")
    bench.patch()
    result = client.beta.responses.create(**ASK, stream=stream)
    if stream:
        assert text_of(list(result)) == "Hello there!"
    else:
        assert result.output[0].content[0].text == "Hello there!"
    assert settled(bench.sink.call) == (streamed(LOCAL) if stream else LOCAL)


@pytest.mark.parametrize("path", ["/responses/compact", "/responses/input_tokens", "/responses/resp_1/cancel"])
def test_its_neighbours_pass(bench, client, path):
    bench.patch()
    client.post(path, body=ASK, cast_to=object)
    assert bench.sink.calls == []
    assert bench.local.seen == []


def test_store_unset_is_routed_if_the_app_says_so(bench, client):
    bench.patch(stateless_responses=True)
    assert client.responses.create(model="gpt-x", input="hi").store is False
    client.responses.create(model="gpt-x", input="hi", store=True)
    assert [call.policy for call in bench.sink.calls] == [CHAMPION, None]


def test_off(bench, client):
    bench.patch(mode="off")
    client.responses.create(**ASK)
    assert bench.sink.calls == []


# What is not routed.

USER = {"role": "user", "content": "hi"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "blue"}
SCHEMA = {"type": "json_schema", "name": "s", "schema": {}}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [USER, *given]}


NOT_ROUTED: dict[str, tuple[dict[str, Any], str]] = {
    "store": ({"store": True}, "the provider keeps the answer"),
    "store unset": ({"store": None}, "the provider keeps the answer"),
    "no model": ({"model": None}, "no model"),
    "no input": ({"input": None}, "no input"),
    "empty input": ({"input": []}, "no input"),
    "previous response": ({"previous_response_id": "resp_1"}, "previous_response_id is the provider's own"),
    "conversation": ({"conversation": "conv_1"}, "conversation is the provider's own"),
    "background": ({"background": True}, "background is the provider's own"),
    "template": ({"prompt": {"id": "pmpt_1"}}, "prompt is the provider's own"),
    "truncation": ({"truncation": "auto"}, "truncation is the provider's own"),
    "max_tool_calls": ({"max_tool_calls": 3}, "max_tool_calls is the provider's own"),
    "compaction": ({"context_management": [{"type": "compaction"}]}, "context_management is the provider's own"),
    "a field of tomorrow": ({"tomorrow": 1}, "tomorrow is the provider's own"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs is the provider's own"),
    "include": ({"include": ["message.output_text.logprobs"]}, "include asks for what only the provider has"),
    "hosted tool": ({"tools": [LOOK, {"type": "web_search"}]}, "a tool that the provider hosts"),
    "mcp": ({"tools": [{"type": "mcp", "server_label": "s"}]}, "a tool that the provider hosts"),
    "custom tool": ({"tools": [{"type": "custom", "name": "x"}]}, "a tool that the provider hosts"),
    "namespace": ({"tools": [{"type": "namespace", "name": "x", "tools": []}]}, "a tool that the provider hosts"),
    "deferred tool": ({"tools": [LOOK | {"defer_loading": True}]}, "a tool's defer_loading is the provider's own"),
    "nameless tool": ({"tools": [{"type": "function"}]}, "a tool without a name"),
    "tools as object": ({"tools": {}}, "tools of another kind than we know"),
    "hosted choice": ({"tool_choice": {"type": "file_search"}}, "a tool that the provider hosts"),
    "unknown choice": ({"tool_choice": "some"}, "a tool that the provider hosts"),
    "allowed tools": (
        {"tool_choice": {"type": "function", "name": "look", "mode": "x"}},
        "a choice of tools that chat does not know",
    ),
    "summary": ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary is the provider's own"),
    "format": ({"text": {"format": {"type": "grammar"}}}, "a text format that chat does not know"),
    "format field": ({"text": {"format": SCHEMA | {"x": 1}}}, "a text format that chat does not know"),
    "text field": ({"text": {"x": 1}}, "text.x is the provider's own"),
    "padding": ({"stream_options": {"include_obfuscation": True}}, "a stream option that chat does not know"),
    "instructions": ({"instructions": [USER]}, "instructions of another kind than we know"),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}]},
        "a part that chat does not know: input_image",
    ),
    "file": (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "a part that chat does not know: input_file",
    ),
    "phase": (items({"role": "assistant", "content": "x", "phase": "commentary"}), "an input item's phase is the"),
    "role": ({"input": [{"role": "critic", "content": "x"}]}, "a message of somebody unknown"),
    "reasoning item": (items({"type": "reasoning", "id": "rs_1", "summary": []}), "an input item that chat does not"),
    "hosted call": (items({"type": "web_search_call", "id": "ws_1"}), "an input item that chat does not know"),
    "reference": (items({"type": "item_reference", "id": "msg_1"}), "an input item that chat does not know"),
    "bare reference": (items({"id": "msg_1"}), "an input item that chat does not know"),
    "orphaned result": (
        items({"type": "function_call_output", "call_id": "c", "output": "x"}),
        "the result of a call that only the provider knows",
    ),
    "result with an image": (
        items(
            RESPONSE_CALL, {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_image"}]}
        ),
        "a part that chat does not know: input_image",
    ),
    "programmatic call": (items(RESPONSE_CALL | {"caller": {"type": "program"}}), "an input item's caller is the"),
    "nameless call": (items({"type": "function_call", "call_id": "c"}), "a function call without id or name"),
    "references in a text": (
        items({"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [{}]}]}),
        "a text with references",
    ),
    "unknown part field": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "breakpoint": {}}]}]},
        "a part's breakpoint is the provider's own",
    ),
}


class Options:
    """What the SDK hands to `request`, as far as it is looked at."""

    url, method, headers, extra_json = "/responses", "post", None, None

    def __init__(self, body: Any) -> None:
        self.json_data = body


def why(body: dict[str, Any], **settings: Any) -> str | None:
    surface = surface_of(Options(body))
    assert surface is not None
    return surface.why_not_routed(Options(body), bool(body.get("stream")), Settings(**settings))


@pytest.mark.parametrize(("more", "reason"), NOT_ROUTED.values(), ids=NOT_ROUTED)
def test_why_it_is_not_routed(more, reason):
    given = {key: value for key, value in (ASK | more).items() if value is not None}
    found = why(given)
    assert found is not None
    assert found.startswith(reason)


@pytest.mark.parametrize("more", [more for more, _ in NOT_ROUTED.values()], ids=NOT_ROUTED)
def test_what_is_not_routed_is_recorded(bench, client, more):
    bench.patch()
    body = {key: value for key, value in (ASK | more).items() if value is not None}
    result = client.post("/responses", body=body, cast_to=Response)
    assert type(result) is Response
    assert bench.local.seen == []
    assert bench.upstream.seen[0].body == body
    call = bench.sink.call
    assert (call.api, call.policy, call.fallback, call.status) == ("responses", None, None, "ok")
    assert call.requested_model == body.get("model", "gpt-template")


ROUTED: dict[str, dict[str, Any]] = {
    "neutral": {"background": False, "truncation": "disabled", "include": [], "top_logprobs": 0, "prompt": None},
    "encrypted reasoning that there is none of": {"include": ["reasoning.encrypted_content"]},
    "hints": {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "user": "u"},
    "effort": {"reasoning": {"effort": "low", "summary": None}},
    "schema": {"text": {"format": SCHEMA, "verbosity": "low"}},
    "padding off": {"stream_options": {"include_obfuscation": False}},
    "choice": {"tools": [LOOK | {"defer_loading": False}], "tool_choice": {"type": "function", "name": "look"}},
    "refusal": items({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
}


@pytest.mark.parametrize("more", ROUTED.values(), ids=ROUTED)
def test_what_is_routed(bench, client, more):
    assert why(ASK | more) is None
    bench.patch()
    client.post("/responses", body=ASK | more, cast_to=Response)
    assert bench.sink.call.policy == CHAMPION
    assert bench.upstream.seen == []


# Whatever the engine does.


def whole(**changes: Any) -> Answer:
    return Answer(body=json.dumps(completion(LOCAL_BODY, **changes)).encode())


def choice(**changes: Any) -> Answer:
    given = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    return whole(choices=[given | changes])


def stream_of(*given: dict[str, Any], done: bool = True) -> Answer:
    """A stream with these choices, one an event."""
    events = [
        b"data: " + json.dumps({"model": CHAMPION, "choices": [{"index": 0} | one]}).encode() + b"\n\n" for one in given
    ]
    return Answer(events=[*events, b"data: [DONE]\n\n"] if done else events)


def good_chunks(**changes: Any) -> list[bytes]:
    return chunks(LOCAL_BODY, **changes)


LATE = "the engine did not answer in time"
INVALID = "the engine's answer is invalid: "
EMPTY = "it is empty, without text or a tool call"
FALLBACK: dict[str, tuple[bool, Answer, str]] = {
    "500": (False, error(500), "the engine answered HTTP 500: no"),
    "400": (False, error(400), "the engine answered HTTP 400: no"),
    "html": (False, Answer(body=b"<html>"), INVALID + "it is not JSON"),
    "a response": (False, Answer(body=json.dumps(response(ASK)).encode()), INVALID + "it comes from another model"),
    "no choices": (False, whole(choices=[]), INVALID + "choices are missing"),
    "no finish reason": (False, whole(finish=None), INVALID + "a choice has no finish reason"),
    "unknown end": (False, whole(finish="abort"), INVALID + "it ended for a reason that we do not know"),
    "list as end": (False, choice(finish_reason=[]), INVALID + "it ended for a reason that we do not know"),
    "content": (False, choice(message={"content": [1]}), INVALID + "its message is of another kind than we know"),
    "call": (False, choice(message={"tool_calls": [{}]}), INVALID + "a tool call is of another kind than we know"),
    "cut": (False, Answer(body=b"{" * 100, cut=True), "the engine cannot be reached"),
    "hang": (False, Answer(hang=True), LATE),
    "stream 500": (True, error(500), "the engine answered HTTP 500: no"),
    "stream html": (True, Answer(body=b"<html>\n"), INVALID + "the stream has no event"),
    "stream empty": (True, Answer(events=[]), INVALID + "the stream has no event"),
    "stream of another": (True, Answer(events=response_events(ASK)), INVALID + "it comes from another model"),
    "stream hang": (True, Answer(hang=True), LATE),
    "stream garbage": (
        True,
        Answer(events=[b'data: {"model": "shop@3", "choices": [1]}\n\n']),
        INVALID + "a choice is none",
    ),
    "without a word": (False, choice(message={"role": "assistant", "content": None}), INVALID + EMPTY),
    "white space": (False, choice(message={"role": "assistant", "content": "\n"}), INVALID + EMPTY),
    "stream without a word": (
        True,
        stream_of({"delta": {"role": "assistant", "content": ""}}, {"delta": {}, "finish_reason": "stop"}),
        INVALID + EMPTY,
    ),
    "stream with nothing but reasoning": (
        True,
        stream_of({"delta": {"reasoning_content": "Well,"}}, {"delta": {}, "finish_reason": "length"}),
        INVALID + EMPTY,
    ),
    "stream that hangs before its first word": (
        True,
        Answer(events=good_chunks(), gate=threading.Event()),
        LATE,
    ),
    "stream with a nameless call": (
        True,
        stream_of({"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}),
        INVALID + "a tool call begins without id or name",
    ),
}


@BOTH
@pytest.mark.parametrize(("stream", "answer", "reason"), FALLBACK.values(), ids=FALLBACK)
def test_upstream_answers(bench, client, make_async, asynchronous, stream, answer, reason):
    async def run() -> Any:
        async with make_async() as client:
            result = await client.responses.create(**ASK, stream=stream)
            return [event async for event in result] if stream else result

    patience_s = 0.3 if reason == LATE else 30.0
    bench.patch(timeout_s=patience_s, first_token_timeout_s=patience_s)
    bench.local.will(answer)
    if asynchronous:
        result = asyncio.run(run())
    else:
        result = client.responses.create(**ASK, stream=stream)
        result = list(result) if stream else result
    assert (text_of(result) if stream else result.output_text) == "Hello there!"
    call = bench.sink.call
    assert settled(call) == replace(RECORDED, fallback=reason)
    (seen,) = bench.upstream.seen
    assert seen.path == "/v1/responses"
    assert seen.body == ASK | ({"stream": stream} if "stream" in seen.body else {})
    assert len(bench.local.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine(bench, client, stream):
    bench.route = Route(champion=CHAMPION, base_url="http://127.0.0.1:9/v1")
    bench.patch()
    result = client.responses.create(**ASK, stream=stream)
    if stream:
        list(result)
    assert bench.sink.call.fallback == "the engine cannot be reached"


def test_both_fail(bench, client):
    bench.patch()
    bench.local.will(error(500))
    bench.upstream.will(error(429, "slow down"))
    with pytest.raises(openai.RateLimitError):
        client.responses.create(**ASK)
    call = bench.sink.call
    assert (call.status, call.api, call.fallback) == ("error", "responses", "the engine answered HTTP 500: no")
    assert call.messages == tuple(MESSAGES)


def test_cancelled_at_the_champion(bench, make_async):
    bench.local.will(Answer(hang=True))
    bench.patch()

    async def run() -> None:
        async with make_async() as client:
            await cancelled_when_seen(bench.local, client.responses.create(**ASK))

    asyncio.run(run())
    call = bench.sink.call
    assert (call.status, call.policy, call.api) == ("cancelled", CHAMPION, "responses")
    assert call.messages == tuple(MESSAGES)
    assert bench.upstream.seen == []


BROKEN: dict[str, Callable[[], list[bytes]]] = {
    "cut": lambda: good_chunks()[:3],
    "no finish reason": lambda: good_chunks(finish=None),
    "garbage": lambda: [*good_chunks()[:2], b"data: {oops\n\n"],
    "choices": lambda: [*good_chunks()[:2], b'data: {"choices": [5]}\n\n'],
    "unknown end": lambda: good_chunks(finish="abort"),
    "error": lambda: [*good_chunks()[:2], b'data: {"error": {"message": "out of memory"}}\n\n'],
}


@BOTH
@pytest.mark.parametrize("name", BROKEN)
def test_a_stream_that_breaks_half_way_is_an_sdk_error(bench, client, make_async, name, asynchronous):
    gate = threading.Event()

    async def run(got: list[Any]) -> None:
        async with make_async() as client:
            async for event in await client.responses.create(**ASK, stream=True):
                got.append(event)
                gate.set()

    bench.patch()
    bench.local.will(Answer(events=BROKEN[name](), cut=name == "cut", gate=gate, gate_after=2))
    got: list[Any] = []
    with pytest.raises(openai.APIError) as caught:
        if asynchronous:
            asyncio.run(run(got))
        else:
            for event in client.responses.create(**ASK, stream=True):
                got.append(event)
                gate.set()
    assert isinstance(caught.value, openai.APIConnectionError) or "out of memory" in str(caught.value)
    del caught  # openai 1 leaves the response open, so what the traceback holds keeps the record waiting
    assert got[0].type == "response.created"
    assert "response.completed" not in [event.type for event in got]
    call = bench.sink.call
    assert (call.status, call.policy, call.untrainable) == ("error", CHAMPION, "the call failed")
    assert bench.upstream.seen == []


@MODES
def test_a_stream_left_early(bench, client, mode):
    answers = {"record": response_events(ASK), "route": good_chunks()}
    gate = threading.Event()
    (bench.local if mode == "route" else bench.upstream).will(Answer(events=answers[mode], gate=gate, gate_after=2))
    bench.patch(mode=mode)
    stream = client.responses.create(**ASK, stream=True)
    next(stream)
    stream.close()
    gate.set()
    del stream
    call = bench.sink.call
    assert (call.status, call.messages) == ("abandoned", tuple(MESSAGES))


def test_a_stream_left_at_its_last_event_is_whole(bench, client):
    bench.patch()
    with client.responses.create(**ASK, stream=True) as stream:
        for event in stream:
            if event.type == "response.completed":
                break
    assert settled(bench.sink.call) == streamed(LOCAL)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "why_incomplete"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_incomplete(bench, client, stream, finish, why_incomplete):
    bench.patch()
    bench.local.will(Answer(events=good_chunks(finish=finish)) if stream else whole(finish=finish))
    result = client.responses.create(**ASK, stream=stream)
    if stream:
        last = list(result)[-1]
        assert last.type == "response.incomplete"
        result = last.response
    assert (result.status, result.incomplete_details.reason) == ("incomplete", why_incomplete)
    assert (result.output_text, result.output[0].status) == ("Hello there!", "incomplete")
    assert bench.sink.call.choices[0].finish_reason == finish


# The translation of the answer.


def translated(answer: Answer) -> list[dict[str, Any]]:
    """The events that the app gets for a stream of the engine's."""
    made = ResponsesRewriter(CHAMPION, "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False, request=ASK).stream()
    out = made.feed(b"".join(answer.events or ())) + made.end()
    return [json.loads(data) for data in sse_events(out)]


def test_text_then_calls_then_text_in_a_stream():
    calls = [
        {"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}},
        {"index": 1, "id": "b", "function": {"name": "g", "arguments": ""}},
    ]
    events = translated(
        stream_of(
            {"delta": {"role": "assistant", "content": "", "reasoning_content": "hm"}},
            {"delta": {"content": "let "}},
            {"delta": {"content": "me", "tool_calls": calls}},
            {"delta": {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}},
            {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}},
            {"delta": {"refusal": "no"}, "finish_reason": "tool_calls"},
            done=False,
        )
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert [
        (item["type"], item.get("call_id"), item.get("name"), item.get("arguments"), item["status"])
        for item in final["output"]
    ] == [
        ("message", None, None, None, "completed"),
        ("function_call", "a", "f", "{}", "completed"),
        ("function_call", "b", "g", "{}", "completed"),
    ]
    assert [(part["type"], part.get("text"), part.get("refusal")) for part in final["output"][0]["content"]] == [
        ("output_text", "let me", None),
        ("refusal", None, "no"),
    ]
    for index, item in enumerate(final["output"]):
        of_it = [event for event in events if event.get("output_index") == index]
        assert of_it[0]["type"] == "response.output_item.added"
        assert of_it[-1] == {
            "type": "response.output_item.done",
            "sequence_number": of_it[-1]["sequence_number"],
            "output_index": index,
            "item": item,
        }
        deltas = "".join(event["delta"] for event in of_it if event["type"].endswith(".delta"))
        spelt = item.get("arguments") or "".join(
            part.get("text") or part.get("refusal") for part in item.get("content", ())
        )
        assert deltas == spelt
    assert "hm" not in json.dumps(events)


def test_only_the_choice_that_was_asked_for_counts():
    with pytest.raises(InvalidAnswer, match="without a finish reason"):
        translated(stream_of({"delta": {"content": "x"}}, {"index": 1, "delta": {}, "finish_reason": "stop"}))


@given(st.data())
def test_how_the_network_cuts_does_not_matter(data):
    wire = b"".join(good_chunks())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    made = ResponsesRewriter(CHAMPION, "gpt-x", 1, keeps_logprobs=False, keeps_token_ids=False, request=ASK).stream()
    out = b"".join(made.feed(piece) for piece in pieces) + made.end()
    read = responses.read_responses_answer(out)
    assert (read.done, read.error) == (True, None)
    assert [(c.message, c.finish_reason) for c in read.choices] == [(SAID, "stop")]


MESSAGE = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.text(min_size=1, max_size=8).filter(str.strip)},
    optional={
        "tool_calls": st.lists(
            st.builds(
                lambda i, name, arguments: {
                    "id": f"call_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                },
                st.integers(0, 99),
                st.text(min_size=1, max_size=5),
                st.text(max_size=8),
            ),
            min_size=1,
            max_size=3,
        )
    },
)


@given(MESSAGE, st.sampled_from(["stop", "length", "content_filter"]))
def test_an_answer_survives_the_way_there_and_back(message, finish):
    """Chat answer -> response -> the same chat answer, read from the response and from its echo in the next prompt."""
    finish = "tool_calls" if finish == "stop" and "tool_calls" in message else finish
    made = ResponsesRewriter(CHAMPION, "m", 1, keeps_logprobs=False, keeps_token_ids=False, request=ASK)
    body = made.whole(choice(message=message, finish_reason=finish).body)
    (read,) = responses.read_responses_answer(body).choices
    assert (read.message, read.finish_reason) == (message, finish)
    echo = json.loads(body)["output"]
    assert list(responses.read_responses_request({"input": echo}).messages) == [message]
    assert why(ASK | {"input": [USER, *echo]}) is None


@given(OBJECT)
def test_any_request_is_survived(body):
    body = {**body, "model": "m"}
    for given_ in (body, body | {"store": False}, body | {"store": False, "input": [body]}):
        options = Options(given_)
        if (
            responses_request.why_not_routed(options, bool(given_.get("stream")), Settings(stateless_responses=True))
            is None
        ):
            asked = responses.read_responses_request(given_)
            assert read_chat_request({"messages": list(asked.messages)}).messages == asked.messages


@given(OBJECT, st.lists(OBJECT, max_size=5))
def test_any_answer_is_translated_or_refused(body, events):
    made = ResponsesRewriter("m", "x", 1, keeps_logprobs=False, keeps_token_ids=False, request=body)
    base = {"model": "m", "choices": [body | {"message": body, "finish_reason": "stop"}]}
    for answer in (body, base):
        try:
            json.loads(made.whole(json.dumps(answer).encode()))
        except InvalidAnswer:
            continue
    stream = made.stream()
    try:
        for event in events:
            choices = [body | {"delta": event, "index": 0}]
            stream.feed(b"data: " + json.dumps({"model": "m", "choices": choices}).encode() + b"\n\n")
        stream.feed(b'data: {"model": "m", "choices": [{"finish_reason": "stop", "delta": {}}]}\n\ndata: [DONE]\n\n')
        assert stream.end() == b""
    except InvalidAnswer:
        pass
