"""Which wordings are one task."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.grouping.wording import corrections, essence, mask, words_of


def meant(text: str) -> tuple[str, ...]:
    return essence(words_of(mask(text)))


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("What is the price of 3 plums?", "what is price of 3 plums"),
        ("Price of 3 plums", "3 plums: price"),
        ("Where is my parcel?", "Hi there! Where is my parcel? Thank you very much."),
        ("Where is my parcel?", "Hello Anna,\n\nwhere is my parcel\n\nBest regards\nBob Miller"),
        ("Cancel my order.", "Could you please cancel my order"),
        ("Where is my parcel", "where is my parcel Many thanks"),
        ("Don't cancel it!", "don\u2019t cancel it"),
        ("My account is blocked. How do I pay?", "How do I pay? My account is blocked."),
        ('Find "The Who"', "find \u201cthe who\u201d"),
    ],
)
def test_the_same_in_other_words(text: str, other: str):
    assert meant(text) == meant(other)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("price of 3 plums", "price of 4 plums"),
        ("price of 3 plums", "price of 3 pears"),
        ("cancel my order", "do not cancel my order"),
        ("cancel my order", "change my order"),
        ("a room with a view", "a room without a view"),
        ("convert German to English", "convert English to German"),
        ("send 5 from Alice to Bob", "send 5 from Bob to Alice"),
        ("does Alice beat Bob", "does Bob beat Alice"),
        ("can you call me", "can I call you"),
        ("translate: thank you very much", "translate: please"),
        ('translate "please"', 'translate "thanks"'),
        ("play The Who", "play Who"),
        ("book the Best Western", "book the Western"),
        ("3 + 4", "3 * 4"),
        ("( 3 + 4 ) * 5", "3 + ( 4 * 5 )"),
        ("write it in C++", "write it in C#"),
        ("refund the 5", "refund the $5"),
        ("costs 3.5", "costs 35"),
        ("sort: 1 2 3", "sort: 3 2 1"),
        ("review\n```\nx = 1\n```", "review\n```\nx = 2\n```"),
        ("first wash then dry", "first dry then wash"),
    ],
)
def test_another_task(text: str, other: str):
    assert meant(text) != meant(other)


@given(
    st.lists(st.sampled_from(("ab", "cd", "ef", "1", "2", "from", "to", "not")), min_size=1, max_size=9),
    st.integers(0, 8),
)
def test_the_halves_may_change_places(words: list[str], cut: int):
    assert meant(" ".join(words)) == meant(" ".join(words[cut:] + words[:cut]))


def test_courtesies_alone_are_a_task_of_their_own():
    assert meant("Hi!") == ("hi",)
    assert meant("") == ()


def test_a_long_text_of_one_word_is_quickly_done():
    assert len(meant("x " * 50_000)) == 50_000


def test_a_rare_slip_is_a_typo():
    counts = {
        "headphones": 300,
        "headphnoes": 1,
        "order": 400,
        "oder": 2,
        "form": 90,
        "from": 400,
        "hte": 1,
        "refund": 400,
    }
    assert corrections(counts) == {"headphnoes": "headphones", "oder": "order"}


def test_a_word_in_use_is_no_typo():
    assert corrections({"contract": 300, "contact": 40}) == {}
    assert corrections({"plums": 90, "plum": 1, "house": 90, "mouse": 1, "cart": 9, "cat": 1}) == {}
    assert corrections({"3000": 900, "3001": 1}) == {}


def test_few_runs_correct_what_is_long_and_clear():
    assert corrections({"headphones": 5, "headpohnes": 1}) == {"headpohnes": "headphones"}
    assert corrections({"headphones": 4, "headpohnes": 1}) == {}


@given(st.dictionaries(st.text("abc", min_size=1, max_size=5), st.integers(1, 2_000)))
def test_corrections_end_at_words_that_are_not_corrected(counts: dict[str, int]):
    found = corrections(counts)
    assert not set(found) & set(found.values())
    assert found == corrections(dict(reversed(counts.items())))
