"""Recorded calls to rows of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from art_patch.records import Choice
from art_patch.training.rows import rows_of
from tests.factory import make_call, make_trajectory


def turn(key: str, prompt: tuple[int, ...], answer: tuple[int, ...], **changes):
    return make_call(key, prompt=prompt, answer=answer, **changes)


def test_a_conversation_that_extends_itself_is_one_row_and_each_sampled_token_is_in_it_once():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3, 4)), turn("b", (1, 2, 3, 4, 5, 6), (7,)))
    (row,) = rows_of(trajectory, max_tokens=100)
    assert row.ids_T == (1, 2, 3, 4, 5, 6, 7)
    assert row.sampled_T == (False, False, True, True, False, False, True)
    assert row.logprobs_T == (0, 0, -0.5, -0.5, 0, 0, -0.5)


def test_a_rewritten_history_starts_a_row_of_its_own():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3, 4)), turn("b", (1, 2, 9, 4, 5), (7,)))
    assert [row.ids_T for row in rows_of(trajectory, max_tokens=100)] == [(1, 2, 3, 4), (1, 2, 9, 4, 5, 7)]


def test_parallel_branches_each_extend_their_own_row():
    trajectory = make_trajectory(
        "t", turn("a", (1,), (2,)), turn("b", (5,), (6,)), turn("a2", (1, 2, 3), (4,)), turn("b2", (5, 6, 7), (8,))
    )
    assert sorted(row.ids_T for row in rows_of(trajectory, max_tokens=100)) == [(1, 2, 3, 4), (5, 6, 7, 8)]


def test_the_same_prompt_asked_twice_is_two_rows():
    trajectory = make_trajectory("t", turn("a", (1, 2), (3,)), turn("b", (1, 2), (4,)))
    assert [row.ids_T for row in rows_of(trajectory, max_tokens=100)] == [(1, 2, 3), (1, 2, 4)]


def test_what_upstream_answered_is_context_but_never_trained():
    trajectory = make_trajectory(
        "t", turn("a", (1, 2), (3,), untrainable="answered by upstream"), turn("b", (1, 2, 3, 4), (5,))
    )
    (row,) = rows_of(trajectory, max_tokens=100)
    assert row.sampled_T == (False, False, False, False, True)


def test_of_several_choices_the_one_that_the_app_went_on_with_is_trained():
    first = make_call("a", prompt=(1,))
    choices = tuple(Choice(n, {"role": "assistant", "content": f"c{n}"}, "stop", (10 + n,), (-0.1,)) for n in range(3))
    first = make_call("a", prompt=(1,), choices=choices)
    after = make_call("b", prompt=(1, 12, 4), answer=(5,), messages=(*first.messages, choices[2].message))
    (row,) = rows_of(make_trajectory("t", first, after), max_tokens=100)
    assert row.ids_T == (1, 12, 4, 5)
    (alone,) = rows_of(make_trajectory("t", first), max_tokens=100)
    assert alone.ids_T == (1, 10)


def test_an_over_long_row_is_cut_and_one_with_nothing_sampled_left_is_gone():
    trajectory = make_trajectory("t", turn("a", (1, 2, 3), (4, 5, 6)))
    assert [row.ids_T for row in rows_of(trajectory, max_tokens=4)] == [(1, 2, 3, 4)]
    assert rows_of(trajectory, max_tokens=3) == ()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=3)
        ),
        max_size=6,
    )
)
def test_every_sampled_token_is_in_exactly_one_row(calls: list[tuple[list[int], list[int]]]):
    trajectory = (
        make_trajectory("t", *(turn(str(n), tuple(p), tuple(a)) for n, (p, a) in enumerate(calls))) if calls else None
    )
    if trajectory is None:
        return
    rows = rows_of(trajectory, max_tokens=1_000)
    assert sum(row.sampled for row in rows) == sum(len(answer) for _, answer in calls)
    for prompt, answer in calls:
        assert any(row.ids_T[: len(prompt) + len(answer)] == (*prompt, *answer) for row in rows)
