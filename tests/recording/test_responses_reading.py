"""What the Responses API and legacy completions say, in the words of chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.recording import Ended, Exchange, chat, responses
from art_patch.recording.converting import Stitcher, read_call
from art_patch.types import Api, Call, Choice
from tests.support.responses import OBJECT
from tests.support.servers import RESPONSE_CALL, TEXT, response, response_events, text_chunks, text_completion

SAID = "".join(TEXT)
LOOK = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}


class Keep:
    """Takes the exchange like a recorder."""

    generation = 0

    def put(self, item: Any, size: int) -> bool:
        return True


def read(
    request: dict[str, Any], answer: bytes, *, api: Api = "responses", ended: Ended = "complete", streamed: bool = False
) -> Call:
    exchange = Exchange(Keep(), request.get("model") or "")  # pyright: ignore[reportArgumentType]
    exchange.api = api
    exchange.streamed = streamed
    exchange.request = json.dumps(request).encode()
    exchange.saw(answer)
    exchange.finish(ended)
    return read_call(exchange)


def whole(request: dict[str, Any], **changes: Any) -> Call:
    return read(request, json.dumps(response(request, **changes)).encode())


def message(text: str, role: str = "assistant") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "status": "completed", "role": role, "content": [part]}


# The prompt.


@pytest.mark.parametrize(
    ("request_", "messages"),
    [
        ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
        (
            {"input": "hi", "instructions": "be kind"},
            [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        ),
        (
            {"input": [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": "u"}]},
            [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}],
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "one"}]}]},
            [{"role": "user", "content": "one"}],
        ),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "see"},
                            {"type": "input_image", "image_url": "data:x", "detail": "low"},
                            {"type": "input_image", "file_id": "file_1"},
                            {"type": "input_file", "file_id": "file_2"},
                        ],
                    }
                ]
            },
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
                        {"type": "input_image", "file_id": "file_1"},
                        {"type": "file", "file": {"file_id": "file_2"}},
                    ],
                }
            ],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "q"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
                    message("let me "),
                    message("look"),
                    RESPONSE_CALL,
                    {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
                    {
                        "type": "function_call_output",
                        "call_id": "call_2",
                        "output": [{"type": "input_text", "text": "red"}],
                    },
                ]
            },
            [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": "let me look",
                    "tool_calls": [
                        LOOK,
                        {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
                {"role": "tool", "tool_call_id": "call_2", "content": "red"},
            ],
        ),
        (
            {
                "input": [
                    {"type": "custom_tool_call", "call_id": "c", "name": "sql", "input": "select 1"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "1"},
                    {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot"}},
                    {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
                    {"id": "msg_0"},
                ]
            },
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "1"},
                {
                    "role": "tool",
                    "tool_call_id": "d",
                    "content": None,
                    "items": [
                        {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot"}}
                    ],
                },
                {
                    "role": "user",
                    "content": None,
                    "items": [{"type": "mcp_approval_response", "approval_request_id": "m", "approve": True}],
                },
                {"role": "assistant", "content": None, "items": [{"id": "msg_0"}]},
            ],
        ),
    ],
)
def test_prompt(request_, messages):
    assert list(responses.read_responses_request(request_).messages) == messages


def test_params_and_tools():
    asked = responses.read_responses_request(
        {
            "model": "gpt-x",
            "input": "hi",
            "temperature": 0.5,
            "top_p": 0.9,
            "max_output_tokens": 7,
            "parallel_tool_calls": False,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": {}, "strict": True}, "verbosity": "low"},
            "tool_choice": {"type": "function", "name": "look"},
            "tools": [
                {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None},
                {"type": "mcp", "server_label": "s", "server_url": "https://u:secret@x", "headers": {"k": "secret"}},
                {"type": "web_search"},
            ],
            "user": "u",
            "metadata": {"a": "b"},
        }
    )
    assert asked.params == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 7,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}, "strict": True}},
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "verbosity": "low",
    }
    assert asked.tools == (
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
        {"type": "mcp", "server_label": "s"},
        {"type": "web_search"},
    )
    assert set(asked.params) <= chat.PARAMS


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"previous_response_id": "resp_1"}, {"previous_response_id": "resp_1"}),
        ({"conversation": "conv_1"}, {"conversation": "conv_1"}),
        ({"conversation": {"id": "conv_1"}}, {"conversation": "conv_1"}),
        ({"prompt": {"id": "pmpt_1", "variables": {"key": "secret"}}}, {"prompt": "pmpt_1"}),
    ],
)
def test_what_the_provider_keeps_is_named(given, kept):
    call = whole(ASK | given)
    assert call.params == kept
    assert call.untrainable == "the provider holds a part of the prompt"


# The answer.

ASK = {"model": "gpt-x", "input": "hi"}


def test_text():
    call = whole(ASK)
    assert call.choices == (Choice(0, {"role": "assistant", "content": SAID}, "stop"),)
    assert (call.prompt_tokens, call.completion_tokens, call.api) == (3, 3, "responses")
    assert (call.status, call.untrainable) == ("ok", "answered by upstream")


def test_everything_else_in_an_answer_stays_readable():
    search = {"id": "ws_1", "type": "web_search_call", "status": "completed"}
    thought = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "thinking"}, {"type": "summary_text", "text": "more"}],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": "gAAA",
    }
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    call = whole(ASK, output=[thought, search, refusal, message("but"), RESPONSE_CALL])
    assert call.choices == (
        Choice(
            0,
            {
                "role": "assistant",
                "content": "but",
                "refusal": "no",
                "tool_calls": [LOOK],
                "reasoning_content": "hm",
                "reasoning_summary": "thinking\n\nmore",
                "items": [search],
            },
            "tool_calls",
        ),
    )


@pytest.mark.parametrize(
    ("changes", "finish", "status", "error"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length", "ok", None),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
            "ok",
            None,
        ),
        ({"status": "incomplete", "incomplete_details": {"reason": "new"}}, "new", "ok", None),
        ({"status": "incomplete"}, None, "ok", None),
        ({"status": "queued"}, None, "ok", None),
        (
            {"status": "failed", "error": {"code": "server_error", "message": "oh no"}},
            None,
            "error",
            "the server ended the answer: oh no",
        ),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_how_it_ended(changes, finish, status, error, streamed):
    wire = b"".join(response_events(ASK, **changes)) if streamed else json.dumps(response(ASK, **changes)).encode()
    call = read(ASK, wire, streamed=streamed)
    (choice,) = call.choices
    assert (choice.finish_reason, call.status, call.error) == (finish, status, error)


def test_a_response_in_the_background_has_no_answer_yet():
    call = whole(ASK | {"background": True}, status="queued", output=[], usage=None)
    assert (call.choices, call.status, call.completion_tokens) == ((), "ok", 0)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "name": "look", "parameters": {}}]])
def test_a_stream_adds_up(tools):
    request = ASK | ({"tools": tools} if tools else {})
    parts = response_events(request)
    streamed, plain = read(request, b"".join(parts), streamed=True), whole(request)
    assert streamed.choices == plain.choices
    assert (streamed.status, streamed.completion_tokens) == ("ok", 3)
    # Servers that leave the output out of the last event, and apps that leave before it.
    bare = json.dumps({"type": "response.completed", "response": response(request, output=[])}).encode()
    assert read(request, b"".join(parts[:-1]) + b"data: " + bare + b"\n\n", streamed=True).choices == plain.choices
    early = read(request, b"".join(parts[:-1]), ended="closed", streamed=True)
    assert (early.choices[0].message, early.status) == (plain.choices[0].message, "abandoned")
    for count in range(len(parts)):
        cut = read(request, b"".join(parts[:count]), ended="closed", streamed=True)
        assert cut.status == "abandoned"


def test_a_stream_left_half_way_keeps_what_came():
    parts = response_events(ASK)
    call = read(ASK, b"".join(parts[:6]), ended="closed", streamed=True)
    assert call.choices == (Choice(0, {"role": "assistant", "content": "Hello there"}, None),)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "code": "server_error", "message": "oh no", "param": None},
        {"error": {"message": "oh no"}},
        {"type": "response.failed", "response": {"status": "failed", "error": {"message": "oh no"}}},
    ],
)
def test_an_error_in_a_stream(event):
    wire = b"".join(response_events(ASK)[:5]) + b"data: " + json.dumps(event).encode() + b"\n\n"
    call = read(ASK, wire, streamed=True)
    assert (call.status, call.error) == ("error", "the server ended the answer: oh no")
    assert call.choices[0].message["content"] == "Hello"


def test_a_template_names_the_model_in_the_answer():
    assert whole({"prompt": {"id": "pmpt_1"}}).requested_model == "gpt-template"


# Conversations.


def test_a_conversation_is_joined():
    stitcher = Stitcher()
    tools = [{"type": "function", "name": "look", "parameters": {}}]
    asked: list[Any] = [{"role": "user", "content": "what colour?"}]
    thought = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    first = whole({"model": "m", "instructions": "i", "tools": tools, "input": asked}, output=[thought, RESPONSE_CALL])
    asked = [*asked, thought, RESPONSE_CALL, {"type": "function_call_output", "call_id": "call_1", "output": "blue"}]
    second = whole({"model": "m", "instructions": "i", "input": asked})
    asked = [*asked, message(SAID), {"role": "user", "content": "sure?"}]
    third = whole({"model": "m", "instructions": "i", "input": asked})
    places = [stitcher.place(call).id for call in (first, second, third)]
    assert len(set(places)) == 1
    assert stitcher.place(whole({"model": "m", "input": "something else"})).id != places[0]


def test_a_conversation_that_moves_between_policy_and_upstream_is_joined():
    """The champion answers in the words of chat; its answer comes back in the words of this API."""
    stitcher = Stitcher()
    question = {"role": "user", "content": "what colour?"}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [LOOK]}
    routed = Call("c", "", 0.0, "m", (question,), (Choice(0, answer, "tool_calls"),), policy="p@1", api="responses")
    later = whole(
        {
            "model": "m",
            "input": [
                question,
                RESPONSE_CALL | {"id": "fc_9"},
                {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
            ],
        }
    )
    assert stitcher.place(routed).id == stitcher.place(later).id


# Legacy completions.


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ("hi", [{"role": "user", "content": "hi"}]),
        (["a", "b"], [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
        ([1, 2], [{"role": "user", "content": [{"type": "token_ids", "token_ids": [1, 2]}]}]),
        (
            [[1], [2]],
            [
                {"role": "user", "content": [{"type": "token_ids", "token_ids": [1]}]},
                {"role": "user", "content": [{"type": "token_ids", "token_ids": [2]}]},
            ],
        ),
        (None, []),
    ],
)
def test_completion_prompts(prompt, messages):
    assert list(chat.read_completions_request({"prompt": prompt, "n": 2}).messages) == messages


@pytest.mark.parametrize("streamed", [False, True])
def test_completions(streamed):
    request = {"model": "m", "prompt": ["a", "b"], "n": 2, "suffix": "z", "user": "u"}
    wire = b"".join(text_chunks(request)) if streamed else json.dumps(text_completion(request)).encode()
    call = read(request, wire, api="completions", streamed=streamed)
    said = {"role": "assistant", "content": SAID}
    assert call.choices == tuple(Choice(index, said, "stop") for index in range(4))
    assert call.params == {"n": 2, "suffix": "z"}
    assert (call.api, call.status, call.untrainable) == ("completions", "ok", "a completion is not a chat")
    if streamed:
        part = b"".join(text_chunks(request)[:8])
        assert read(request, part, api="completions", ended="closed", streamed=True).status == "abandoned"
        ended = b"".join(text_chunks(request)[:-1])
        assert read(request, ended, api="completions", ended="closed", streamed=True).status == "ok"


# Whatever is sent.


@given(OBJECT, OBJECT)
def test_any_json_is_survived(request, answer):
    for api in ("responses", "completions", "chat"):
        call = read(request, json.dumps(answer).encode(), api=api)
        json.dumps([call.messages, call.tools, call.params, [choice.message for choice in call.choices]])


@given(OBJECT, st.lists(OBJECT, max_size=6))
def test_any_events_are_survived(request, events):
    wire = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    for api in ("responses", "completions", "chat"):
        Stitcher().place(read(request, wire, api=api, streamed=True))
