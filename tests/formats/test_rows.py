"""What each training format says of a trajectory, and why some have no row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art_patch.formats import Unusable, chat_row, grpo_row, preference_rows, sft_prompt_rows, sft_row
from art_patch.formats.rows import run_of, writable
from art_patch.types import Call, Choice, Group, Trajectory
from tests.support.factory import make_call, make_group, make_trajectory
from tests.support.run_samples import SYSTEM, TOOL, asked, choice, plain_run, tool_run


def with_last_answer(trajectory: Trajectory, **changes: Any) -> Trajectory:
    *calls, last = trajectory.calls
    answer = replace(last.choices[0], **changes)
    return replace(trajectory, calls=(*calls, replace(last, choices=(answer,))))


def test_chat_is_what_openai_takes():
    message = {"role": "assistant", "content": "31", "refusal": None, "annotations": [], "audio": None}
    row = chat_row(with_last_answer(tool_run("t", "plum", "31"), message=message))
    assert row == {
        "messages": [
            SYSTEM,
            asked("plum"),
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_t",
                        "type": "function",
                        "function": {"name": "lookup", "arguments": '{"item": "plum"}'},
                    }
                ],
            },
            {"role": "tool", "content": "31 cents", "tool_call_id": "call_t"},
            {"role": "assistant", "content": "31"},
        ],
        "tools": [TOOL],
        "parallel_tool_calls": False,
    }


def test_sft_is_what_chat_templates_read():
    messages = sft_row(tool_run("t", "plum", "31"))["messages"]
    function = {"name": "lookup", "arguments": {"item": "plum"}}
    assert messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_t", "type": "function", "function": function}],
    }
    parts = make_call(messages=({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, asked("x")))  # fmt: skip  # noqa: E501
    assert sft_row(make_trajectory("t", parts))["messages"][0] == {"role": "system", "content": "a\nb"}


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"item": '}}
    answer = {"role": "assistant", "tool_calls": [call]}
    row = sft_row(with_last_answer(tool_run("t", "plum", ""), message=answer))
    assert row["messages"][-1]["tool_calls"] == [call]


def test_prompt_and_completion_is_a_row_for_each_answer():
    first, second = sft_prompt_rows(tool_run("t", "plum", "31"))
    assert (len(first["prompt"]), len(second["prompt"])) == (2, 4)
    assert second["completion"] == [{"role": "assistant", "content": "31"}]
    assert first["tools"] == second["tools"] == [TOOL]


def image(url: str) -> Trajectory:
    content = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    return make_trajectory("t", make_call(messages=({"role": "user", "content": content},)))


HASHED = f"data:image/png;base64,sha256:{'a' * 64};bytes=40000"


@pytest.mark.parametrize(
    ("trajectory", "reason", "formats"),
    [
        (Trajectory(tool_run("t", "x", "y").info, ()), "no call was recorded", "chat sft"),
        (make_trajectory("t", replace(make_call(), choices=())), "it ends without an answer", "chat sft"),
        (make_trajectory("t", replace(make_call(), api="completions")), "a completion is not a chat", "chat sft"),
        (make_trajectory("t", make_call(params={"previous_response_id": "r"})), "the provider holds a part of the prompt", "chat sft"),  # noqa: E501
        (make_trajectory("t", make_call(text="")), "an answer is empty", "chat sft"),
        (with_last_answer(plain_run("t", "q", "a"), finish_reason="length"), "the last answer was cut", "sft"),
        (image(HASHED), "an image, audio or file was recorded as its hash only", "chat"),
        (image("https://x/y.png"), "it holds an image, audio or file", "sft"),
        (plain_run("t", "q", "a", "b", "c"), "", "chat sft"),
        (make_trajectory("t", make_call(messages=({"role": "martian", "content": "x"},))), "a message has a role that no format knows", "chat sft"),  # noqa: E501
    ],
)  # fmt: skip
def test_why_there_is_no_row(trajectory: Trajectory, reason: str, formats: str):
    for row_of in (chat_row, sft_row):
        if row_of.__name__.removesuffix("_row") in formats.split() and reason:
            with pytest.raises(Unusable, match=f"^{reason}"):
                row_of(trajectory)
        elif "image" not in reason:
            assert row_of(trajectory)["messages"]


def test_what_json_cannot_say():
    assert writable({"a": "x\ud800y"}) == {"a": "x\ufffdy"}
    with pytest.raises(Unusable, match="a number that JSON does not have"):
        writable({"a": float("nan")})


def test_the_prompt_is_what_was_asked_first_examples_included():
    examples = (
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
    )
    run = run_of(make_trajectory("t", make_call(messages=examples)))
    assert run.prompt == examples
    assert [message["content"] for message in run.rest] == ["yo"]


def group_of(*answers: str, item: str = "plum") -> Group:
    return make_group(*(tool_run(f"t{index}", item, answer) for index, answer in enumerate(answers)))


def finals(rows: Any) -> list[tuple[str, str]]:
    return [(row["chosen"][-1]["content"], row["rejected"][-1]["content"]) for row in rows]


def test_best_against_worst():
    group = group_of("good", "bad", "best")
    (row,) = preference_rows(group, (0.8, 0.1, 0.95))
    assert finals([row]) == [("best", "bad")]
    assert (row["prompt"], row["tools"]) == ([SYSTEM, asked("plum")], [TOOL])
    assert [message["role"] for message in row["chosen"]] == ["assistant", "tool", "assistant"]
    assert (row["score_chosen"], row["score_rejected"], row["group_id"]) == (0.95, 0.1, "g")


def test_all_pairs_with_a_margin():
    group = group_of("good", "bad", "best")
    rewards = (0.8, 0.1, 0.95)
    assert finals(preference_rows(group, rewards, all_pairs=True)) == [
        ("best", "good"),
        ("best", "bad"),
        ("good", "bad"),
    ]
    assert finals(preference_rows(group, rewards, all_pairs=True, margin=0.2)) == [("best", "bad"), ("good", "bad")]


@pytest.mark.parametrize(
    ("group", "rewards", "reason"),
    [
        (group_of("a", "b"), (0.5, 0.5), "no two siblings"),
        (group_of("a", "b"), (0.5, None), "fewer than two"),
        (make_group(tool_run("a", "plum", "x"), tool_run("b", "pear", "y")), (1.0, 0.0), "no two siblings"),
        (make_group(tool_run("a", "plum", "x"), make_trajectory("b", replace(make_call(), choices=()))), (1.0, 0.0), "fewer than two"),  # noqa: E501
    ],
)  # fmt: skip
def test_groups_without_a_pair(group: Group, rewards: tuple[float | None, ...], reason: str):
    with pytest.raises(Unusable, match=reason):
        list(preference_rows(group, rewards))


def test_best_against_worst_for_each_prompt_of_a_group():
    runs = (tool_run("a", "plum", "x"), tool_run("b", "pear", "y"), tool_run("c", "plum", "z"))
    assert finals(preference_rows(make_group(*runs), (1.0, 0.5, 0.0))) == [("x", "z")]


def test_random_ids_do_not_make_prompts_differ():
    def again(key: str, answer: str) -> Trajectory:
        (_first, second) = tool_run(key, "plum", answer).calls
        return make_trajectory(key, second)

    assert finals(preference_rows(make_group(again("a", "x"), again("b", "y")), (1.0, 0.0))) == [("x", "y")]


def test_grpo_has_the_prompt_and_how_it_fared():
    group = group_of("a", "b", "c")
    row = grpo_row(group.trajectories[0], group=group, rewards_G=(0.5, None, 1.0))
    assert row == {
        "prompt": [SYSTEM, asked("plum")],
        "tools": [TOOL],
        "scenario_key": "task:x",
        "group_id": "g",
        "reward": 0.75,
        "best_reward": 1.0,
        "siblings": 3,
    }


def test_of_several_answers_the_first_is_taken_where_the_app_did_not_go_on():
    answers = tuple(choice({"role": "assistant", "content": text}, index=index) for index, text in enumerate("ab"))
    call = Call("c", "t", 1.0, "m", (asked("x"),), answers)
    assert chat_row(make_trajectory("t", call))["messages"][-1]["content"] == "a"
    assert isinstance(call.choices[0], Choice)
