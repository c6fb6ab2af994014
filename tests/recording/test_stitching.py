"""Conversations find back to their trajectory, however they are interleaved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from art_patch.recording.converting import Stitcher
from art_patch.types import Call, Choice


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(*messages: dict[str, Any], answers: tuple[dict[str, Any], ...], at: float = 0.0) -> Call:
    return Call("c", "", at, "m", messages, tuple(Choice(i, answer) for i, answer in enumerate(answers)))


def test_a_conversation_goes_on():
    stitcher = Stitcher()
    first = stitcher.place(call(user("a"), answers=(said("b"),), at=5.0), "g")
    second = stitcher.place(call(user("a"), said("b"), user("c"), answers=(said("d"),)))
    third = stitcher.place(call(user("a"), said("b"), user("c"), said("d"), user("e"), answers=()))
    assert (first.origin, first.group_key, first.started_at) == ("single", "g", 5.0)
    assert second == third == replace(first, origin="stitched")


def test_the_same_call_again_is_another_trajectory():
    stitcher = Stitcher()
    ids = {stitcher.place(call(user("a"), answers=(said("b"),))).id for _ in range(3)}
    assert len(ids) == 3


def test_the_latest_that_was_not_extended_goes_on():
    stitcher = Stitcher()
    runs = [stitcher.place(call(user("a"), answers=(said("b"),))).id for _ in range(3)]
    more = [stitcher.place(call(user("a"), said("b"), user("c"), answers=())).id for _ in range(4)]
    assert more == [*reversed(runs), runs[-1]]


def test_any_of_n_answers_goes_on():
    stitcher = Stitcher()
    run = stitcher.place(call(user("a"), answers=(said("b"), said("c"))))
    assert stitcher.place(call(user("a"), said("c"), user("d"), answers=())).id == run.id


def test_echoes_in_other_words():
    tool = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    stitcher = Stitcher()
    run = stitcher.place(
        call(user("a"), answers=(said(None, tool_calls=[tool], refusal=None, reasoning="hm", annotations=[]),))
    )
    echo = said(
        "", tool_calls=[{"function": {"arguments": "{}", "name": "f"}, "id": "1", "type": "function", "index": 0}]
    )
    result = {"role": "tool", "tool_call_id": "1", "content": "4"}
    assert stitcher.place(call(user("a"), echo, result, answers=(said("b"),))).id == run.id
    parts = said([{"type": "text", "text": "b"}])  # pyright: ignore[reportArgumentType]
    assert stitcher.place(call(user("a"), echo, result, parts, user("c"), answers=())).id == run.id


def test_what_is_remembered_is_bounded():
    stitcher = Stitcher(max_nodes=4)  # two for each call
    runs = [stitcher.place(call(user(str(i)), answers=(said("b"),))).id for i in range(3)]
    again = [stitcher.place(call(user(str(i)), said("b"), user("c"), answers=())).id for i in range(3)]
    assert again[0] not in runs
    assert again[1:] == runs[1:]


def test_a_retry_without_the_dropped_answer_goes_on():
    stitcher = Stitcher()
    task, error = (user("rules"), user("task")), user("error: call a tool")
    run = stitcher.place(call(*task, answers=(said("hm"),)))
    again = stitcher.place(call(*task, error, answers=(said("well"),)))
    third = stitcher.place(call(*task, error, error, answers=(said("call"),)))
    last = stitcher.place(call(*task, error, error, said("call"), user("result"), answers=(said("done"),)))
    assert {run.id, again.id, third.id, last.id} == {run.id}


def test_whose_answer_was_dropped_is_never_guessed():
    prompt, error = (user("task"),), user("error")
    # Two siblings, neither of which has gone on.
    stitcher = Stitcher()
    runs = {stitcher.place(call(*prompt, answers=(said(text),))).id for text in "ab"}
    assert stitcher.place(call(*prompt, error, answers=())).id not in runs
    # One of them failed and has no answer.
    stitcher = Stitcher()
    runs = {stitcher.place(call(*prompt, answers=answers)).id for answers in ((said("a"),), ())}
    assert stitcher.place(call(*prompt, error, answers=())).id not in runs
    # One has gone on with its answer: then the other one dropped it.
    stitcher = Stitcher()
    one, other = (stitcher.place(call(*prompt, answers=(said(text),))) for text in "ab")
    assert stitcher.place(call(*prompt, said("a"), user("c"), answers=())).id == one.id
    assert stitcher.place(call(*prompt, error, answers=())).id == other.id


def test_what_began_before_the_answer_came_is_no_retry():
    stitcher = Stitcher()
    first = replace(call(user("a"), answers=(said("b"),), at=10.0), duration_ms=2000)
    run = stitcher.place(first)
    assert stitcher.place(call(user("a"), user("c"), answers=(), at=11.9)).id != run.id
    assert stitcher.place(call(user("a"), user("c"), answers=(), at=12.0)).id == run.id
    rules = {"role": "system", "content": "rules"}
    alone = stitcher.place(call(rules, answers=(said("b"),), at=13.0))
    assert stitcher.place(call(rules, user("a"), answers=(), at=14.0)).id != alone.id


@given(st.data(), st.integers(1, 4), st.booleans())
def test_runs_with_dropped_answers_stay_apart(data, count, equal):
    """Any order of turns, good and bad answers: no trajectory holds two runs, and a run of its own task is one."""
    stitcher = Stitcher()
    talks = [[user("task" if equal else f"task {i}")] for i in range(count)]
    ids: list[set[str]] = [set() for _ in talks]
    turns = st.lists(st.tuples(st.integers(0, count - 1), st.booleans()), max_size=25)
    for number, (turn, dropped) in enumerate(data.draw(turns)):
        answer = said(f"{turn} says {number}")
        ids[turn].add(stitcher.place(call(*talks[turn], answers=(answer,))).id)
        talks[turn] += [user("error")] if dropped else [answer, user("and?")]
    used = [found for found in ids if found]
    assert len(set.union(set(), *used)) == sum(map(len, used))
    if not equal:
        assert all(len(found) == 1 for found in used)


@given(st.data(), st.integers(2, 5))
def test_interleaved_conversations_stay_apart(data, count):
    """Different questions, any order of turns: each conversation is one trajectory, and no two share one."""
    stitcher = Stitcher()
    talks = [[user(f"question {i}")] for i in range(count)]
    ids: list[set[str]] = [set() for _ in talks]
    for turn in data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=25)):
        talk = talks[turn]
        ids[turn].add(stitcher.place(call(*talk, answers=(said("yes"),))).id)
        talk += [said("yes"), user("and?")]
    used = [found for found in ids if found]
    assert all(len(found) == 1 for found in used)
    assert len(set.union(*used)) == len(used)


@given(st.permutations(range(4)))
def test_equal_runs_share_no_trajectory(order):
    """Four runs that say the same: each later turn extends another one, whichever comes first."""
    stitcher = Stitcher()
    for turn in range(3):
        talk = [user("q")]
        for _ in range(turn):
            talk += [said("yes"), user("and?")]
        ids = [stitcher.place(call(*talk, answers=(said("yes"),))).id for _ in order]
        assert len(set(ids)) == 4
