"""Pairs of a better and a worse answer: whole rows compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art_patch.training import Pair, Renderer, Row, family_of, preferences
from art_patch.training.data.supervised import Preferences
from art_patch.types import Call, Choice, Correction, Trajectory
from tests.support.factory import make_call, make_group, make_trajectory
from tests.training.templates import tokenizer_with

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(tokenizer_with("qwen2_5"), family_of("qwen2"))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def upstreams(key: str, text: str, finish: str = "stop", **changes: Any) -> Call:
    values: dict[str, Any] = {
        "policy": None,
        "untrainable": "answered by upstream",
        "messages": [USER],
        "choices": (Choice(0, said(text), finish),),
    }
    return make_call(key, prompt=None, **(values | changes))


def run(key: str, *calls: Call) -> Trajectory:
    return make_trajectory(key, *calls)


def recorded(key: str, prompt: tuple[int, ...], answer: tuple[int, ...], **changes: Any) -> Trajectory:
    return run(key, make_call(f"{key}-c", prompt=prompt, answer=answer, text=key, **changes))


def row(*tokens: tuple[tuple[int, ...], bool]) -> Row:
    ids = tuple(token for part, _ in tokens for token in part)
    marks = tuple(mark for part, mark in tokens for _ in part)
    return Row(ids, marks, (0.0,) * len(ids), (1.0,) * len(ids))


def prefer(
    renderer: Renderer, *scored: tuple[Trajectory, float | None], max_tokens: int = 1_000, held_out: bool = False,
    may_imitate: Any = lambda _: True,
) -> Preferences:  # fmt: skip
    group = replace(make_group(*(trajectory for trajectory, _ in scored)), held_out=held_out)
    rewards = [reward for _, reward in scored]
    return preferences([(group, rewards)], (), renderer, margin=0.2, max_tokens=max_tokens, may_imitate=may_imitate)


# groups


def test_the_best_against_the_worst_by_recorded_ids(renderer: Renderer):
    runs = [recorded(key, (1, 2), answer) for key, answer in (("a", (3,)), ("b", (4, 5)), ("c", (6,)))]
    found = prefer(renderer, (runs[0], 0.5), (runs[1], 0.9), (runs[2], 0.1), (recorded("d", (1, 2), (7,)), None))
    assert found == Preferences(
        (Pair(row(((1, 2), False), ((4, 5), True)), row(((1, 2), False), ((6,), True)), "group"),), {"no reward": 1}
    )


def test_ids_count_even_where_they_cannot_be_trained_by_their_log_probabilities(renderer: Renderer):
    greedy = recorded("a", (1, 2), (3,), params={"temperature": 0.0}, untrainable="greedy sampling has no exploration")
    found = prefer(renderer, (greedy, 1.0), (recorded("b", (1, 2), (4,)), 0.0))
    assert [pair.chosen for pair in found.pairs] == [row(((1, 2), False), ((3,), True))]


def test_a_run_of_several_turns_is_one_row_with_all_its_answers(renderer: Renderer):
    long = run("a", make_call("1", prompt=(1, 2), answer=(3,)), make_call("2", prompt=(1, 2, 3, 4), answer=(5,)))
    found = prefer(renderer, (long, 1.0), (recorded("b", (1, 2), (6,)), 0.0))
    assert found.pairs[0].chosen == row(((1, 2), False), ((3,), True), ((4,), False), ((5,), True))


def test_a_run_that_forks_is_in_no_pair(renderer: Renderer):
    forked = run("a", make_call("1", prompt=(1, 2), answer=(3,)), make_call("2", prompt=(9, 2, 3, 4), answer=(5,)))
    found = prefer(renderer, (forked, 1.0), (recorded("b", (1, 2), (6,)), 0.0))
    assert found == Preferences(
        (), {"the run forks into several rows": 1, "no two siblings with this prompt differ enough": 1}
    )


def test_siblings_with_another_prompt_are_compared_among_themselves(renderer: Renderer):
    runs = [recorded(key, prompt, (ord(key),)) for key, prompt in (("a", (1,)), ("b", (2,)), ("c", (1,)), ("d", (2,)))]
    found = prefer(renderer, (runs[0], 1.0), (runs[1], 0.0), (runs[2], 0.9), (runs[3], 0.2))
    assert [(pair.chosen.ids_T, pair.rejected.ids_T) for pair in found.pairs] == [((2, 100), (2, 98))]
    assert found.left_out == {"no two siblings with this prompt differ enough": 1}


def test_upstreams_answer_is_rendered_and_stands_beside_a_policys(renderer: Renderer):
    prompt = renderer.prompt_ids(make_call(messages=[USER]))
    ours = run("a", make_call("1", prompt=prompt, answer=(7, 8), messages=[USER]))
    found = prefer(renderer, (run("u", upstreams("2", "yo")), 1.0), (ours, 0.0))
    answer = tuple(renderer.tokenizer.encode("yo<|im_end|>"))
    assert found.pairs == (Pair(row((prompt, False), (answer, True)), row((prompt, False), ((7, 8), True)), "group"),)


def test_a_cut_answer_may_be_the_worse_one_alone(renderer: Renderer):
    cut = Choice(0, said("y"), "length", (3,), (-0.5,))
    best = run("a", make_call("1", prompt=(1, 2), choices=(cut,)))
    good, poor = recorded("b", (1, 2), (4,)), recorded("c", (1, 2), (5,))
    assert [p.chosen.ids_T for p in prefer(renderer, (best, 1.0), (good, 0.9), (poor, 0.1)).pairs] == [(1, 2, 4)]
    assert [p.rejected.ids_T for p in prefer(renderer, (best, 0.0), (good, 0.9)).pairs] == [(1, 2, 3)]


def test_what_cannot_be_rendered_is_in_no_pair(renderer: Renderer):
    found = prefer(
        renderer,
        (run("a", upstreams("1", "yo", finish="length")), 1.0),
        (run("b", upstreams("2", "yo", api="completions")), 1.0),
        (run("c", make_call("3", choices=())), 1.0),
    )
    assert found == Preferences((), {"the answer was cut": 1, "a completion is not a chat": 1, "no answer": 1})


def test_pairs_that_teach_nothing(renderer: Renderer):
    twins = recorded("a", (1, 2), (3,)), recorded("b", (1, 2), (3,))
    assert prefer(renderer, (twins[0], 1.0), (twins[1], 0.0)).left_out == {"both answers are the same": 1}
    others = recorded("a", (1, 2), (3,)), recorded("b", (1, 2), (4, 5))
    found = prefer(renderer, (others[0], 1.0), (others[1], 0.0), max_tokens=3)
    assert found == Preferences((), {"longer than max_tokens": 1})
    assert prefer(renderer, (others[0], 1.0), (others[1], 0.0), held_out=True) == Preferences(
        (), {"held out for the gate": 2}
    )


# corrections


def put_right(
    renderer: Renderer, trajectory: Trajectory, message: dict[str, Any], may_imitate: Any = lambda _: True
) -> Preferences:
    correction = Correction("x", trajectory.id, 1.0, "user", message)
    return preferences(
        (), [(trajectory, [correction])], renderer, margin=0.2, max_tokens=1_000, may_imitate=may_imitate
    )


def test_a_correction_is_preferred_to_what_was_answered(renderer: Renderer):
    prompt = renderer.prompt_ids(make_call(messages=[USER]))
    right, wrong = (tuple(renderer.tokenizer.encode(f"{text}<|im_end|>")) for text in ("yo", "ho"))
    found = put_right(renderer, run("t", upstreams("a", "ho")), said("yo"))
    expected = Pair(row((prompt, False), (right, True)), row((prompt, False), (wrong, True)), "correction")
    assert found == Preferences((expected,), {})


def test_what_a_policy_answered_is_rejected_by_its_recorded_ids(renderer: Renderer):
    prompt = renderer.prompt_ids(make_call(messages=[USER]))
    found = put_right(renderer, run("t", make_call("a", prompt=prompt, answer=(7, 8), messages=[USER])), said("yes"))
    assert found.pairs[0].rejected == row((prompt, False), ((7, 8), True))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call("a", prompt=(1, 2), messages=[USER]), "the chat template renders another prompt than was recorded"),
        (upstreams("a", "yes"), "the correction is what was answered"),
        (upstreams("a", "ho", choices=()), "the call that was corrected has no answer"),
        (upstreams("a", "ho", finish="length"), "the answer was cut"),
        (upstreams("a", "ho", params={"conversation": "c"}), "the provider holds a part of the prompt"),
    ],
)
def test_why_a_correction_gives_no_pair(renderer: Renderer, call: Call, reason: str):
    assert put_right(renderer, run("t", call), said("yes")) == Preferences((), {reason: 1})


# permission


def test_no_answer_of_a_model_that_is_not_allowed_is_in_a_pair(renderer: Renderer):
    prompt = tuple(renderer.prompt_ids(make_call(messages=[USER])))
    ours = [recorded(key, prompt, (7, number)) for number, key in enumerate("ab")]
    theirs = run("t", upstreams("c", "yo"))
    every = (theirs, 1.0), (ours[0], 0.6), (ours[1], 0.0)
    (pair,) = prefer(renderer, *every).pairs
    assert pair.rejected.ids_T[-2:] == (7, 1) and pair.chosen.ids_T[-2:] != (7, 0)
    found = prefer(renderer, *every, may_imitate=lambda _: False)
    (pair,) = found.pairs
    assert (pair.chosen.ids_T[-2:], pair.rejected.ids_T[-2:]) == ((7, 0), (7, 1))
    assert found.left_out == {"training on answers of m is not allowed": 1}


def test_a_correction_is_compared_with_no_answer_that_is_not_allowed(renderer: Renderer):
    found = put_right(renderer, run("t", upstreams("a", "ho")), said("yo"), may_imitate=lambda _: False)
    assert found == Preferences((), {"training on answers of m is not allowed": 1})
