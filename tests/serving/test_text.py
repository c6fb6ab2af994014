"""Text, stop strings and tool calls come out the same however the ids were cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.serving.embedded.text import OutputText, StopCutter, ToolCall, ToolCallParser
from tests.support.tiny import make_tokenizer

GOOD = '<tool_call>\n{"name": "lookup", "arguments": {"item": "plum"}}\n</tool_call>'
PLUM = ToolCall("lookup", '{"item": "plum"}')

FRAGMENTS = st.sampled_from(
    [GOOD, "<tool_call>", "</tool_call>", "<tool_", "call>", "<", "{}", '{"name": "f", "arguments": {}}', "hello", " ",
     "\n", "é", "…", "🙂", '{"name": 1, "arguments": {}}', "STOP", "ST", "OP"]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def cut(text: Any, cuts: list[int]) -> list[Any]:
    places = sorted({0, len(text), *(min(place, len(text)) for place in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser()
    return joined([*parser.feed(text), *parser.close()])


def joined(parts: list[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    return "".join(p for p in parts if isinstance(p, str)), [p for p in parts if isinstance(p, ToolCall)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ("", "", []),
        (" spaced \n", " spaced \n", []),
        (GOOD, "", [PLUM]),
        (f"Let me see.\n{GOOD}", "Let me see.", [PLUM]),
        (f"{GOOD}\n{GOOD}\n", "", [PLUM, PLUM]),
        (f"a {GOOD} b", "ab", [PLUM]),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ("<tool_call>{'name': 1}</tool_call> x", "<tool_call>{'name': 1}</tool_call> x", []),
        (f"<tool_call>junk</tool_call>\n{GOOD}", "<tool_call>junk</tool_call>", [PLUM]),
        (f"{GOOD} <tool_call>never closed", "<tool_call>never closed", [PLUM]),
        ("a < b <tool", "a < b <tool", []),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, []),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", None, []),
    ],
)
def test_calls_are_taken_out_and_everything_else_stays(text: str, content: str | None, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text) == (text if content is None else content, calls)


def test_half_a_surrogate_pair_stays_readable() -> None:
    _, (call,) = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"x": "\\ud800é"}}</tool_call>')
    assert json.loads(call.arguments.encode()) == {"x": "\ud800é"}


@given(TEXTS, st.lists(st.integers(0, 200), max_size=20))
def test_tool_calls_do_not_depend_on_how_text_is_split(text: str, cuts: list[int]) -> None:
    parser = ToolCallParser()
    parts = [part for piece in cut(text, cuts) for part in parser.feed(piece)] + parser.close()
    assert joined(parts) == parse_tool_calls(text)
    if "<tool_call>" not in text:
        assert joined(parts)[0] == text


@given(TEXTS, st.lists(st.sampled_from(["STOP", "OP", "<", "call>h", "\n\n"]), max_size=3))
def test_a_stop_string_cuts_at_its_first_place(text: str, stops: list[str]) -> None:
    # A stream can only stop where a stop string is complete; among those that complete first the leftmost counts.
    cutter = StopCutter(stops)
    out = ""
    for character in text:
        out += cutter.feed(character)
        if cutter.hit:
            break
    out += cutter.close()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        assert cutter.hit is not None
        assert not any(stop in out for stop in stops)
        assert text.startswith(out + cutter.hit)
    else:
        assert out == text


TOKENIZER = make_tokenizer(512)


def decode(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@given(
    st.one_of(
        TEXTS.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False)),
        st.lists(st.integers(0, 511), max_size=60),
    ),
    st.lists(st.integers(0, 99), max_size=30),
    st.lists(st.sampled_from(["STOP", "h", "🙂", "\n\n"]), max_size=2),
    st.booleans(),
    st.booleans(),
)
def test_token_by_token_and_at_once_give_the_same(
    ids: list[int], cuts: list[int], stops: list[str], tools: bool, one_call: bool
) -> None:
    def run(pieces: list[list[int]]) -> tuple[str, list[ToolCall], str | None]:
        text = OutputText(decode, stops=stops, parse_tools=tools, one_call=tools and one_call)
        parts = [part for piece in pieces for part in text.push(piece)] + text.close()
        return *joined(parts), text.stop_string

    single = [[token_id] for token_id in ids]
    if len(stops) < 2:
        assert run(cut(ids, cuts)) == run([ids]) == run(single)
    if not stops and not tools:
        assert run(single)[0] == decode(ids)
