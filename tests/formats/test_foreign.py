"""Files of other tools: what becomes of each row, and what is said of one that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art_patch.errors import MalformedFile
from art_patch.formats import bundles_of, chat_row

USER = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def only(row: dict[str, Any]) -> Any:
    (bundle,) = bundles_of(row, at=10.0)
    return bundle.trajectory


def test_a_conversation_is_a_call_for_each_answer():
    again = {"role": "user", "content": "sure?"}
    row = {"messages": [USER, FIVE, again, FOUR], "tools": [TOOL], "parallel_tool_calls": True, "source": "mine"}
    trajectory = only(row)
    assert trajectory.info.origin == "imported"
    assert trajectory.info.metadata == {"source": "mine"}
    first, second = trajectory.calls
    assert (first.messages, first.choices[0].message) == ((USER,), FIVE)
    assert (second.messages, second.choices[0].message) == ((USER, FIVE, again), FOUR)
    for call in trajectory.calls:
        assert (call.untrainable, call.tools, call.params) == ("imported", (TOOL,), {"parallel_tool_calls": True})
        assert call.choices[0].finish_reason == "stop"
    assert first.id < second.id


def test_weight_0_is_context_only_and_stays():
    row = {"messages": [USER, {**FIVE, "weight": 0}, USER, {**FOUR, "weight": 1}]}
    trajectory = only(row)
    (call,) = trajectory.calls
    assert len(call.messages) == 3
    assert chat_row(trajectory) == row


def test_older_function_calls_become_tools():
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
            {"role": "function", "name": "add", "content": "4"},
            FOUR,
        ],
        "functions": [TOOL["function"]],
    }
    trajectory = only(row)
    assert chat_row(trajectory) == {
        "messages": [
            USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
                ],
            },
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
            FOUR,
        ],
        "tools": [TOOL],
    }
    assert trajectory.calls[0].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "row",
    [
        {"input": {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": True}, "preferred_output": [FOUR], "non_preferred_output": [FIVE]},  # noqa: E501
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE], "tools": [TOOL], "parallel_tool_calls": True},
        {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE], "tools": json.dumps([TOOL]), "parallel_tool_calls": True},  # noqa: E501
        {"chosen": [USER, FOUR], "rejected": [USER, FIVE], "tools": [TOOL], "parallel_tool_calls": True},
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "tools": [TOOL], "parallel_tool_calls": True},
    ],
)  # fmt: skip
def test_a_preference_is_a_scored_pair(row: dict[str, Any]):
    chosen, rejected = bundles_of(row, at=10.0)
    assert chosen.group == rejected.group
    assert chosen.group is not None
    assert (chosen.group["how"], chosen.group["state"]) == ("imported", "dead")
    for bundle, message, value in ((chosen, FOUR, 1.0), (rejected, FIVE, 0.0)):
        (call,), (score,) = bundle.trajectory.calls, bundle.trajectory.scores
        assert (call.messages, call.choices[0].message, call.tools) == ((USER,), message, (TOOL,))
        assert call.params == {"parallel_tool_calls": True}
        assert (score.name, score.value, score.source) == ("reward", value, "user")


def test_a_preference_keeps_its_scores():
    row = {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE], "score_chosen": 9, "score_rejected": 2.5}
    assert [bundle.trajectory.scores[0].value for bundle in bundles_of(row)] == [9.0, 2.5]


def test_prompts_alone_and_with_completions():
    (call,) = only({"prompt": [USER], "scenario_key": "sum", "reward": 0.5}).calls
    assert (call.messages, call.choices) == ((USER,), ())
    (call,) = only({"prompt": [USER], "completion": [FOUR]}).calls
    assert (call.messages, call.choices[0].message) == ((USER,), FOUR)


def test_ids_come_from_the_row():
    one, other = {"messages": [USER, FOUR]}, {"messages": [USER, FIVE]}
    assert only(one).id == only(dict(one)).id != only(other).id


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "no known format has the keys (none)"),
        ({"text": "x"}, "no known format has the keys text"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": "hi"}, "messages must be a list of messages"),
        ({"messages": [USER]}, "messages: the last message is the user's, not the assistant's"),
        ({"messages": [USER, 3]}, "messages[1] must be an object"),
        ({"messages": [{"role": "human", "content": "x"}]}, "messages[0].role must be one of system,"),
        ({"messages": [{"role": "user"}, FOUR]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 3}, FOUR]}, "messages[0].content must be a text or a list"),
        ({"messages": [{"role": "user", "content": ["x"]}, FOUR]}, "a part without a type"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "says nothing and calls nothing"),
        ({"messages": [USER, {**FOUR, "weight": 2}]}, "weight must be 0 or 1, not 2"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": {}}]}, "messages[1].tool_calls must be a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "[0].function.name is missing"),
        ({"messages": [USER, FOUR], "tools": "{"}, "tools is a text that is no JSON"),
        ({"messages": [USER, FOUR], "tools": [3]}, "tools must be a list of objects"),
        ({"messages": [USER, FOUR], "parallel_tool_calls": "no"}, "parallel_tool_calls must be true or false"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}, FOUR]}, "a function that was not called"),
        ({"preferred_output": [FOUR], "non_preferred_output": [FIVE]}, "input is missing"),
        ({"input": {"messages": [USER]}, "preferred_output": [FOUR]}, "non_preferred_output is missing"),
        ({"input": 3, "preferred_output": [FOUR], "non_preferred_output": [FIVE]}, "input must be an object"),
        (
            {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE], "score_chosen": "x"},
            "score_chosen must be a number",
        ),
        ({"chosen": [FOUR], "rejected": [FIVE]}, "have no prompt in common"),
        ({"prompt": [USER], "completion": [USER]}, "completion: the last message is the user's"),
        ({"format": "art_patch.trajectory/9"}, "this release reads art_patch.trajectory/1; upgrade"),
    ],
)
def test_what_is_wrong_is_said(row: dict[str, Any], words: str):
    with pytest.raises(MalformedFile) as caught:
        bundles_of(row)
    assert words in str(caught.value)


def test_another_format_than_the_one_named():
    with pytest.raises(MalformedFile, match="of format chat, not preference"):
        bundles_of({"messages": [USER, FOUR]}, expected="preference")
    assert bundles_of({"messages": [USER, FOUR]}, expected="sft")
