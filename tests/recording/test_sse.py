"""The SSE parser: how the network or the line ends cut a stream cannot matter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.recording import chat, responses
from art_patch.recording.chat import assemble, events
from tests.support.growth import too_steep

CHUNK = st.dictionaries(
    st.sampled_from(["choices", "usage", "model", "error", "x"]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["content", "tool_calls"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["index", "delta", "content", "tool_calls", "token_ids", "logprobs"]), inner
            )
        ),
        max_leaves=12,
    ),
    max_size=4,
)


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_what_goes_in_comes_out(datas, end):
    wire = "".join(f": ping{end}event: x{end}data: {data}{end}{end}" for data in datas)
    assert list(events(wire.encode())) == datas


@given(st.lists(st.sampled_from(["a", "", "b c"]), min_size=1, max_size=4))
def test_lines_of_one_event_join(lines):
    wire = "".join(f"data: {line}\n" for line in lines) + "\n"
    assert list(events(wire.encode())) == ["\n".join(lines)]


def test_a_cut_event_is_dropped():
    assert list(events(b"data: a\n\ndata: b\n")) == ["a"]
    assert list(events(b"data: a\n\ndata: [DONE]\n")) == ["a", "[DONE]"]
    assert list(events(b"\xef\xbb\xbfdata:a\n\n")) == ["a"]


@given(st.binary())
def test_any_bytes_are_survived(wire):
    assert isinstance(assemble(events(wire)).body["choices"], list)


@given(st.lists(CHUNK))
def test_any_json_is_survived(parts):
    answer = assemble(json.dumps(part) for part in parts)
    assert isinstance(answer.body["choices"], list)


def test_what_is_not_text_in_a_tool_call_is_left_out():
    call = {"index": 0, "id": "c", "function": {"name": 5, "arguments": {"a": 1}}}
    answer = assemble([json.dumps({"choices": [{"delta": {"tool_calls": [call]}}]})])
    assert answer.body["choices"][0]["message"]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "", "arguments": ""}}
    ]


def _chat(delta: object) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta}]})


def _responses(kind: str) -> str:
    return json.dumps({"type": f"response.{kind}.delta", "output_index": 0, "content_index": 0, "delta": "abcd"})


@pytest.mark.parametrize(
    ("read", "event"),
    [
        (chat.read_chat_answer, _chat({"content": "abcd"})),
        (chat.read_chat_answer, _chat({"tool_calls": [{"index": 0, "function": {"arguments": "abcd"}}]})),
        (responses.read_responses_answer, _responses("output_text")),
        (responses.read_responses_answer, _responses("function_call_arguments")),
        (chat.read_completions_answer, json.dumps({"choices": [{"index": 0, "text": "abcd"}]})),
    ],
)
def test_a_long_stream_takes_linear_time(read, event):
    wire = f"data: {event}\n\n".encode()
    assert too_steep(read, lambda size: wire * (size // 4), (10_000, 100_000, 1_000_000)) is None
