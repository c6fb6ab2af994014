"""Recorded calls to rows: every sampled token once, in the context it was sampled in, whatever the calls look like."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training import Row, RowsReport, rows_and_report, trained_answers
from art_patch.training.data.rows import TRUNCATED
from art_patch.types import Call, Choice, Trajectory
from tests.support.factory import make_call, make_trajectory
from tests.support.tiny import make_tokenizer
from tests.training.templates import tokenizer_with


def turn(key: str, prompt: tuple[int, ...], answer: tuple[int, ...], **changes: Any) -> Call:
    return make_call(key, prompt=prompt, answer=answer, **changes)


def rows_of(trajectory: Trajectory, max_tokens: int) -> tuple[Row, ...]:
    return rows_and_report(trajectory, max_tokens=max_tokens)[0]


def ids_of(*calls: Call, max_tokens: int = 100) -> list[tuple[int, ...]]:
    return [row.ids_T for row in rows_of(make_trajectory("t", *calls), max_tokens)]


def report_of(*calls: Call, max_tokens: int = 100) -> RowsReport:
    return rows_and_report(make_trajectory("t", *calls), max_tokens=max_tokens)[1]


def test_a_conversation_that_extends_itself_is_one_row_and_each_sampled_token_is_in_it_once():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3, 4)), turn("b", (1, 2, 3, 4, 5, 6), (7,)))
    (row,) = rows_of(trajectory, 100)
    assert row.ids_T == (1, 2, 3, 4, 5, 6, 7)
    assert row.sampled_T == (False, False, True, True, False, False, True)
    assert row.logprobs_T == (0, 0, -0.5, -0.5, 0, 0, -0.5)


def test_each_token_keeps_the_temperature_it_was_sampled_at():
    cold, plain = turn("a", (1,), (2,), params={"temperature": 0.5}), turn("b", (1, 2, 3), (4,))
    (row,) = rows_of(make_trajectory("t", cold, plain), 100)
    assert row.temperature_T == (1.0, 0.5, 1.0, 1.0)


def test_a_rewritten_history_starts_a_row_of_its_own():
    assert ids_of(turn("a", (1, 2), (3, 4)), turn("b", (1, 2, 9, 4, 5), (7,))) == [(1, 2, 3, 4), (1, 2, 9, 4, 5, 7)]


def test_a_prompt_that_is_the_beginning_of_a_row_starts_one_of_its_own():
    long = turn("a", (1, 2, 3, 4), (5, 6))
    assert ids_of(long, turn("b", (1, 2), (9,))) == [(1, 2, 3, 4, 5, 6), (1, 2, 9)]
    # even if it ends in the middle of an answer: that part of it is context, trained where it was sampled
    rows = rows_of(make_trajectory("t", long, turn("b", (1, 2, 3, 4, 5), (7,))), 100)
    assert [(row.ids_T, row.sampled) for row in rows] == [((1, 2, 3, 4, 5, 6), 2), ((1, 2, 3, 4, 5, 7), 1)]


def test_parallel_branches_each_extend_their_own_row():
    calls = turn("a", (1,), (2,)), turn("b", (5,), (6,)), turn("a2", (1, 2, 3), (4,)), turn("b2", (5, 6, 7), (8,))
    assert ids_of(*calls) == [(1, 2, 3, 4), (5, 6, 7, 8)]


def test_sub_agents_that_branch_from_a_common_prefix_train_it_once():
    calls = turn("main", (1, 2), (3, 4)), turn("one", (1, 2, 3, 4, 5), (6,)), turn("two", (1, 2, 3, 4, 7), (8,))
    trajectory = make_trajectory("t", *calls, turn("one again", (1, 2, 3, 4, 5, 6, 9), (10,)))
    rows, report = rows_and_report(trajectory, max_tokens=100)
    assert [row.ids_T for row in rows] == [(1, 2, 3, 4, 5, 6, 9, 10), (1, 2, 3, 4, 7, 8)]
    assert [row.sampled for row in rows] == [4, 1]
    assert report == RowsReport(rows=2, forks=1, tokens=5)


def test_a_call_goes_on_with_the_longest_row_that_its_prompt_extends():
    calls = turn("short", (1,), (2,)), turn("other", (1, 2), (3,)), turn("last", (1, 2, 3, 4), (5,))
    assert ids_of(*calls) == [(1, 2, 3, 4, 5)]
    assert ids_of(turn("b", (1, 7), (3,)), turn("a", (1,), (7,)), turn("c", (1, 7, 3, 4), (5,))) == [
        (1, 7, 3, 4, 5),
        (1, 7),
    ]


def test_the_same_prompt_asked_twice_is_two_rows():
    assert ids_of(turn("a", (1, 2), (3,)), turn("b", (1, 2), (4,))) == [(1, 2, 3), (1, 2, 4)]
    assert ids_of(turn("a", (1, 2), (3,)), turn("b", (1, 2), (3,))) == [(1, 2, 3), (1, 2, 3)]


def test_what_upstream_answered_is_context_but_never_trained():
    upstream = turn("a", (1, 2), (3,), untrainable="answered by upstream", policy=None)
    (row,) = rows_of(make_trajectory("t", upstream, turn("b", (1, 2, 3, 4), (5,))), 100)
    assert row.sampled_T == (False, False, False, False, True)


def test_of_several_choices_the_one_that_the_app_went_on_with_is_trained():
    choices = tuple(Choice(n, {"role": "assistant", "content": f"c{n}"}, "stop", (10 + n,), (-0.1,)) for n in range(3))
    first = make_call("a", prompt=(1,), choices=choices)
    after = make_call("b", prompt=(1, 12, 4), answer=(5,), messages=(*first.messages, choices[2].message))
    assert ids_of(first, after) == [(1, 12, 4, 5)]
    assert report_of(first, after) == RowsReport(rows=1, tokens=2, other_choices=2)
    assert ids_of(first) == [(1, 10)]


def test_an_over_long_row_is_cut_and_one_with_nothing_sampled_left_is_gone():
    call = turn("a", (1, 2, 3), (4, 5, 6))
    assert ids_of(call, max_tokens=4) == [(1, 2, 3, 4)]
    assert report_of(call, max_tokens=4) == RowsReport(rows=1, tokens=1, cut_tokens=2)
    assert ids_of(call, max_tokens=3) == []
    assert report_of(call, max_tokens=3) == RowsReport(cut_tokens=3)


def test_a_cut_row_ends_with_its_last_sampled_token():
    calls = turn("a", (1,), (2,)), turn("b", (1, 2, 3, 4, 5, 6), (7,))
    assert ids_of(*calls, max_tokens=5) == [(1, 2)]


def uneven(key: str, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> Call:
    choice = Choice(0, {"role": "assistant", "content": "x"}, "stop", token_ids, logprobs)
    return make_call(key, prompt=(1,), choices=(choice,))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (turn("a", (1,), (2,), untrainable="answered by upstream"), "answered by upstream"),
        (uneven("a", (2, 3), (-0.5,)), "token ids and log-probabilities differ in number"),
        (uneven("a", (2,), (float("nan"),)), "a log-probability is not finite"),
        (make_call("a", prompt=None), "prompt token ids are missing"),
        (turn("a", (1,), (2,), params={"top_p": 0.9}), "top_p cuts the distribution"),
        (make_call("a", choices=()), "no answer"),
    ],
)
def test_what_is_not_exact_is_left_out_and_counted_whatever_the_record_says(call: Call, reason: str):
    good = turn("b", (1, 2, 3), (4,))
    assert ids_of(call, good) == [(1, 2, 3, 4)]
    assert report_of(call, good) == RowsReport(rows=1, tokens=1, left_out={reason: 1})


def test_reports_add_up():
    one = report_of(turn("a", (1,), (2,)), turn("b", (3,), (4, 5)), make_call("c", prompt=None), max_tokens=2)
    assert one == RowsReport(rows=2, forks=1, tokens=2, cut_tokens=1, left_out={"prompt token ids are missing": 1})
    other = report_of(uneven("d", (2,), ()), make_call("e", prompt=None))
    assert one + other == RowsReport(
        rows=2,
        forks=1,
        tokens=2,
        cut_tokens=1,
        left_out={"prompt token ids are missing": 2, "token ids and log-probabilities differ in number": 1},
    )


# whatever the tree of calls


def truncated(key: str, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Call:
    call = turn(key, prompt, answer)
    return replace(call, choices=(replace(call.choices[0], finish_reason="length"),))


def test_an_answer_that_was_cut_off_is_context_if_it_is_not_to_be_learned():
    calls = turn("a", (1,), (2,)), truncated("b", (1, 2, 3), (4, 5)), turn("c", (1, 2, 3, 4, 5, 6), (7,))
    trajectory = make_trajectory("t", *calls)
    (row,), report = rows_and_report(trajectory, max_tokens=100, learn_truncated=False)
    assert row == Row(
        ids_T=(1, 2, 3, 4, 5, 6, 7),
        sampled_T=(False, True, False, False, False, False, True),
        logprobs_T=(0, -0.5, 0, 0, 0, 0, -0.5),
        temperature_T=(1.0,) * 7,
    )
    assert report == RowsReport(rows=1, tokens=2, truncated_tokens=2, left_out={TRUNCATED: 1})
    assert report_of(*calls) == RowsReport(rows=1, tokens=4)


def test_a_row_in_which_only_that_was_sampled_is_gone():
    trajectory = make_trajectory("t", truncated("a", (1,), (2, 3)))
    assert rows_and_report(trajectory, max_tokens=100, learn_truncated=False) == (
        (),
        RowsReport(truncated_tokens=2, left_out={TRUNCATED: 1}),
    )


@st.composite
def trees(draw: st.DrawFn) -> list[Call]:
    """Calls of an agent and its sub-agents: each goes on from a part of what was said before, or from nothing.

    Sampled tokens are unique, so that each can be found again.
    """
    said: list[tuple[int, ...]] = [()]
    calls: list[Call] = []
    for number in range(draw(st.integers(1, 8))):
        history = draw(st.sampled_from(said))
        upto = draw(st.sampled_from([len(history), draw(st.integers(0, len(history)))]))
        added = draw(st.lists(st.integers(0, 2), min_size=0 if upto else 1, max_size=3))
        prompt = (*history[:upto], *added)
        length = draw(st.integers(1, 3))
        answer = tuple(100 * (number + 1) + place for place in range(length))
        calls.append(turn(str(number), prompt, answer))
        said += [prompt, prompt + answer]
    return calls


@given(trees())
def test_every_sampled_token_is_in_exactly_one_row_after_exactly_what_it_was_sampled_after(calls: list[Call]):
    rows, report = rows_and_report(make_trajectory("t", *calls), max_tokens=1_000)
    before = {
        token: (*(call.prompt_token_ids or ()), *answer[:place])
        for call in calls
        for answer in [call.choices[0].token_ids or ()]
        for place, token in enumerate(answer)
    }
    found = [
        (token, row.ids_T[:place])
        for row in rows
        for place, (token, sampled) in enumerate(zip(row.ids_T, row.sampled_T, strict=True))
        if sampled
    ]
    assert len(found) == len(before) and dict(found) == before
    assert (report.tokens, report.rows, report.forks) == (len(before), len(rows), len(rows) - 1)
    for row in rows:
        assert len(row.ids_T) == len(row.sampled_T) == len(row.logprobs_T) == len(row.temperature_T)
        assert row.logprobs_T == tuple(-0.5 if sampled else 0.0 for sampled in row.sampled_T)


@given(trees(), st.integers(1, 12))
def test_a_cut_takes_only_what_is_beyond_it(calls: list[Call], max_tokens: int):
    trajectory = make_trajectory("t", *calls)
    whole, (rows, report) = rows_of(trajectory, 1_000), rows_and_report(trajectory, max_tokens=max_tokens)
    kept = [row for row in whole if any(row.sampled_T[:max_tokens])]
    assert [row.ids_T for row in rows] == [
        row.ids_T[: 1 + max(place for place in range(min(max_tokens, len(row.ids_T))) if row.sampled_T[place])]
        for row in kept
    ]
    assert report.tokens + report.cut_tokens == sum(row.sampled for row in whole)


# tokens that their text does not lead back to


def pieces(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The text byte by byte, as no encoder would cut it."""
    return tuple(tokenizer.convert_tokens_to_ids(piece.replace(" ", "\u0120")) for piece in text)


def test_nothing_is_tokenised_again():
    tokenizer = make_tokenizer()
    sampled = pieces(tokenizer, "the price")
    assert tuple(tokenizer.encode(tokenizer.decode(sampled))) != sampled
    prompt = tuple(tokenizer.encode("what is"))
    assert ids_of(turn("a", prompt, sampled)) == [prompt + sampled]


def test_a_template_that_strips_thinking_forks_and_each_answer_is_trained_in_the_context_it_was_sampled_in():
    """Qwen 3's own template: NeMo-RL issue 2821."""
    tokenizer = tokenizer_with("qwen3")

    def ids(messages: list[dict[str, str]]) -> tuple[int, ...]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer.encode(text))

    asked = [{"role": "user", "content": "hi"}]
    first = tuple(tokenizer.encode("<think>\nhm\n</think>\n\nyo<|im_end|>"))
    second = tuple(tokenizer.encode("<think>\n\n</think>\n\nbye<|im_end|>"))
    went_on = [
        *asked,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo"},
        {"role": "user", "content": "?"},
    ]
    calls = turn("a", ids(asked), first), turn("b", ids(went_on), second)
    rows, report = rows_and_report(make_trajectory("t", *calls), max_tokens=1_000)
    assert [row.ids_T for row in rows] == [ids(asked) + first, ids(went_on) + second]
    assert [row.sampled for row in rows] == [len(first), len(second)]
    assert report.forks == 1
    assert "hm" not in tokenizer.decode(rows[1].ids_T)


def test_a_policy_that_is_not_ours_is_never_trained_even_if_its_ids_are_known():
    assert ids_of(replace(turn("a", (1,), (2,)), policy=None)) == []


@given(trees(), st.sets(st.integers(0, 7)))
def test_exactly_the_tokens_of_answers_that_were_cut_off_are_not_trained(calls: list[Call], which: set[int]):
    ended = [
        truncated(call.id, call.prompt_token_ids or (), call.choices[0].token_ids or ()) if n in which else call
        for n, call in enumerate(calls)
    ]
    trajectory = make_trajectory("t", *ended)
    (all_rows, all_report), (rows, report) = (
        rows_and_report(trajectory, max_tokens=1_000, learn_truncated=learn) for learn in (True, False)
    )

    def trained(rows: tuple[Row, ...]) -> set[int]:
        return {token for row in rows for token, sampled in zip(row.ids_T, row.sampled_T, strict=True) if sampled}

    gone = {token for n, call in enumerate(calls) if n in which for token in call.choices[0].token_ids or ()}
    assert trained(rows) == trained(all_rows) - gone
    assert (report.tokens, report.truncated_tokens) == (all_report.tokens - len(gone), len(gone))
    assert report.left_out == ({TRUNCATED: len(which & set(range(len(calls))))} if gone else {})


def test_the_trained_answers_are_named_by_call_and_choice():
    choices = tuple(Choice(n, {"role": "assistant", "content": f"c{n}"}, "stop", (10 + n,), (-0.1,)) for n in range(3))
    first = make_call("a", prompt=(1,), choices=choices)
    after = make_call("b", prompt=(1, 12, 4), answer=(5,), messages=(*first.messages, choices[2].message))
    upstream = turn("d", (1,), (2,), untrainable="answered by upstream", policy=None)
    trajectory = make_trajectory("t", first, after, truncated("c", (1, 9), (9,)), upstream)
    assert trained_answers(trajectory, max_tokens=100) == (("a", 2), ("b", 0), ("c", 0))
    assert trained_answers(trajectory, max_tokens=100, learn_truncated=False) == (("a", 2), ("b", 0))
    assert trained_answers(trajectory, max_tokens=2) == (("a", 2),)


@given(trees(), st.integers(1, 30))
def test_no_answer_is_trained_that_is_not_named(calls: list[Call], max_tokens: int):
    trajectory = make_trajectory("t", *calls)
    named = dict(trained_answers(trajectory, max_tokens=max_tokens))
    tokens = sum(
        min(len(call.choices[0].token_ids or ()), max_tokens - len(call.prompt_token_ids or ()))
        for call in calls
        if call.id in named
    )
    assert tokens == rows_and_report(trajectory, max_tokens=max_tokens)[1].tokens
