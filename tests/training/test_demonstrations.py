"""What is imitated: whole rows compared, by their text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art_patch.training import Renderer, Row, TrainConfig, demonstrations, family_of
from art_patch.training.data.supervised import Demonstrations
from art_patch.types import Call, Choice, Correction, Trajectory
from tests.support.factory import make_call, make_group, make_trajectory
from tests.training.templates import tokenizer_with

USER = {"role": "user", "content": "hi"}
AGAIN = {"role": "user", "content": "and?"}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "31"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}],
}


@pytest.fixture(scope="module")
def qwen2() -> Renderer:
    return Renderer(tokenizer_with("qwen2_5"), family_of("qwen2"))


@pytest.fixture(scope="module")
def qwen3() -> Renderer:
    return Renderer(tokenizer_with("qwen3"), family_of("qwen3"))


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def upstreams(key: str, messages: list[dict[str, Any]], answer: dict[str, Any], **changes: Any) -> Call:
    finish = changes.pop("finish", "tool_calls" if answer.get("tool_calls") else "stop")
    values: dict[str, Any] = {
        "policy": None,
        "untrainable": "answered by upstream",
        "choices": (Choice(0, answer, finish),),
    }
    return make_call(key, prompt=None, messages=messages, **(values | changes))


def run(key: str, *calls: Call) -> Trajectory:
    return make_trajectory(key, *calls)


def learn(
    renderer: Renderer, *scored: tuple[Trajectory, float | None], corrections: Any = (), max_tokens: int = 10_000,
    may_imitate: Any = lambda _: True,
) -> Demonstrations:  # fmt: skip
    group = make_group(*(trajectory for trajectory, _ in scored))
    given = [(group, [reward for _, reward in scored])] if scored else []
    return demonstrations(
        given, corrections, renderer, least_reward=0.5, max_tokens=max_tokens, may_imitate=may_imitate
    )


def marked(renderer: Renderer, row: Row) -> list[str]:
    """The row's text in pieces, by turns not learned and learned."""
    pieces: list[list[int]] = [[]]
    learned = False
    for token, sampled in zip(row.ids_T, row.sampled_T, strict=True):
        if sampled is not learned:
            pieces.append([])
            learned = sampled
        pieces[-1].append(token)
    return [renderer.tokenizer.decode(piece) for piece in pieces]


SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"


def test_each_answer_of_a_run_is_learned_once_with_its_end_but_not_the_newline_after_it(qwen2: Renderer):
    calls = upstreams("a", [USER], CALLED), upstreams("b", [USER, CALLED, RESULT], said("31 cents"))
    found = learn(qwen2, (run("t", *calls), 1.0))
    (row,) = found.rows
    assert marked(qwen2, row) == [
        f"{SYSTEM}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\n31\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "31 cents<|im_end|>",
    ]
    assert set(row.logprobs_T) == {0.0} and set(row.temperature_T) == {1.0}
    assert found.left_out == {}


def test_thinking_that_is_stripped_from_history_gives_a_row_for_each_answer(qwen3: Renderer):
    first = upstreams("a", [USER], said("yo", reasoning_content="hm"))
    second = upstreams("b", [USER, said("yo"), AGAIN], said("bye", reasoning_content="well"))
    found = learn(qwen3, (run("t", first, second), 1.0))
    assert [marked(qwen3, row) for row in found.rows] == [
        [
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
            "<think>\nhm\n</think>\n\nyo<|im_end|>",
        ],
        [
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
            "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\nwell\n</think>\n\nbye<|im_end|>",
        ],
    ]


def test_only_good_runs_are_imitated(qwen2: Renderer):
    good, poor, unjudged = (run(key, upstreams(key, [USER], said(key))) for key in ("good", "poor", "unjudged"))
    found = learn(qwen2, (good, 0.5), (poor, 0.49), (unjudged, None))
    assert [marked(qwen2, row)[-1] for row in found.rows] == ["good<|im_end|>"]
    assert found.left_out == {"reward too low": 1, "no reward": 1}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call("a"), "answered by a policy"),
        (upstreams("a", [USER], said("y"), api="completions"), "a completion is not a chat"),
        (upstreams("a", [USER], said("y"), params={"previous_response_id": "r"}), "the provider holds a part of the prompt"),  # noqa: E501
        (upstreams("a", [USER], said("y"), status="abandoned"), "the call did not end well"),
        (upstreams("a", [USER], said("y"), finish="length"), "the answer was cut"),
        (upstreams("a", [USER], said("y"), finish=None), "the answer was cut"),
        (upstreams("a", [USER], said("")), "an answer is empty"),
        (upstreams("a", [USER], said("y"), choices=()), "no answer"),
        (upstreams("a", [{"role": "user", "content": [{"type": "image_url"}]}], said("y")), "it holds an image, audio or file"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_left_out_is_counted_and_the_rest_of_the_run_is_learned(qwen2: Renderer, call: Call, reason: str):
    found = learn(qwen2, (run("t", call, upstreams("b", [AGAIN], said("bye"))), 1.0))
    assert [marked(qwen2, row)[-1] for row in found.rows] == ["bye<|im_end|>"]
    assert found.left_out == {reason: 1}


def test_an_answer_is_learned_once_however_often_it_was_grouped_or_copied(qwen2: Renderer):
    whole = run("t", upstreams("a", [USER], said("yo")))
    copy = run("copy", upstreams("a2", [USER], said("yo"), shadow_of="a"))
    groups = [(make_group(whole), [0.1]), (make_group(whole, copy, key="h"), [0.9, 0.9])]
    found = demonstrations(groups, (), qwen2, least_reward=0.5, max_tokens=100, may_imitate=lambda _: True)
    assert len(found.rows) == 1
    assert found.left_out == {"learned from another copy": 1}


def test_held_out_groups_teach_nothing(qwen2: Renderer):
    group = replace(make_group(run("t", upstreams("a", [USER], said("yo")))), held_out=True)
    found = demonstrations([(group, [1.0])], (), qwen2, least_reward=0.5, max_tokens=100, may_imitate=lambda _: True)
    assert found == Demonstrations((), {"held out for the gate": 1})


def correction(trajectory: Trajectory, message: dict[str, Any], **changes: Any) -> Correction:
    return Correction("x", trajectory.id, 1.0, "user", message, **changes)


def test_of_a_corrected_run_only_the_corrected_answer_is_learned(qwen2: Renderer):
    wrong = run("t", upstreams("a", [USER], CALLED), upstreams("b", [USER, CALLED, RESULT], said("32 cents")))
    copy = run("copy", upstreams("b2", [USER, CALLED, RESULT], said("32 cents"), shadow_of="b"))
    found = learn(qwen2, (wrong, 1.0), (copy, 1.0), corrections=[(wrong, [correction(wrong, said("31 cents"))])])
    (row,) = found.rows
    assert marked(qwen2, row)[1:] == ["31 cents<|im_end|>"]
    assert "32" not in qwen2.tokenizer.decode(row.ids_T)
    assert found.left_out == {"learned from another copy": 1}


def test_a_policys_answer_is_corrected_too(qwen2: Renderer):
    wrong = run("t", make_call("a", messages=[USER], text="ho"))
    (row,) = learn(qwen2, corrections=[(wrong, [correction(wrong, said("yo"))])]).rows
    assert marked(qwen2, row)[-1] == "yo<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "fix", "reason"),
    [
        ({}, {"call_id": "gone"}, "the call that was corrected is not there"),
        ({"api": "completions"}, {}, "a completion is not a chat"),
    ],
)
def test_why_a_correction_is_not_learned(qwen2: Renderer, changes: dict[str, Any], fix: dict[str, Any], reason: str):
    wrong = run("t", upstreams("a", [USER], said("ho"), **changes))
    found = learn(qwen2, corrections=[(wrong, [correction(wrong, said("yo"), **fix)])])
    assert found == Demonstrations((), {reason: 1})


def test_rows_are_cut_as_recorded_ones_are(qwen2: Renderer):
    good = run("t", upstreams("a", [USER], said("yo yo yo")))
    (whole,) = learn(qwen2, (good, 1.0)).rows
    (row,) = learn(qwen2, (good, 1.0), max_tokens=len(whole.ids_T) - 1).rows
    assert row.ids_T == whole.ids_T[:-1]


def test_only_answers_of_models_that_are_allowed_are_imitated_and_corrections_always(qwen2: Renderer):
    ours, mixed = upstreams("a", [USER], said("a"), requested_model="qwen-max"), upstreams("b", [USER], said("b"))
    right = Correction("r", "put", 1.0, "user", said("better"))
    put = run("put", upstreams("p", [USER], said("p"), requested_model="gpt-x"))
    found = learn(
        qwen2, (run("1", ours), 1.0), (run("2", mixed), 1.0), corrections=[(put, [right])],
        may_imitate=TrainConfig(imitate_models=("qwen*",)).may_imitate,
    )  # fmt: skip
    assert [marked(qwen2, row)[-1] for row in found.rows] == ["better<|im_end|>", "a<|im_end|>"]
    assert found.left_out == {"training on answers of m is not allowed": 1}
