"""Packs: every example once and whole, every sampled token predicted from the one before it, nothing twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training import Example, Row
from art_patch.training.data.packing import Pack, packs_of


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ids = tuple(draw(st.lists(st.integers(0, 2), min_size=2, max_size=9)))
    sampled = (False, *draw(st.lists(st.booleans(), min_size=len(ids) - 2, max_size=len(ids) - 2)), True)
    return Row(
        ids,
        sampled,
        tuple(-float(t) if each else 0.0 for t, each in enumerate(sampled)),
        tuple(draw(st.sampled_from([0.5, 1.0])) if each else 1.0 for each in sampled),
    )


examples = st.lists(
    st.builds(Example, st.lists(rows(), min_size=1, max_size=3).map(tuple), st.sampled_from([-1.0, 0.5])),
    min_size=1,
    max_size=5,
)


def prefix(pack: Pack, place: int) -> tuple[int, ...]:
    """What the model has read at a packed place."""
    where = next(each for each in pack.tree.where_R if place in each)
    return tuple(pack.tree.ids_P[where[: list(where).index(place) + 1]].tolist())


@given(examples, st.integers(1, 40))
def test_what_is_scored_is_what_was_sampled(given_examples: list[Example], max_tokens: int):
    found: list[list[tuple[object, ...]]] = [[] for _ in given_examples]
    for pack in packs_of(given_examples, max_tokens):
        for n, place in enumerate(pack.place_N):
            e = pack.example_N[n]
            asked = (float(pack.temperature_Q[place]), float(pack.recorded_N[n]), float(pack.advantage_N[n]))
            at = int(pack.at_Q[place])
            found[pack.examples_E[e]].append((prefix(pack, at), int(pack.target_N[n]), *asked))
    assert found == [
        [
            (row.ids_T[:t], row.ids_T[t], row.temperature_T[t], row.logprobs_T[t], example.advantage)
            for row in example.rows
            for t, sampled in enumerate(row.sampled_T)
            if sampled
        ]
        for example in given_examples
    ]


@given(examples, st.integers(1, 40))
def test_an_example_is_in_one_pack_and_packs_keep_their_size(given_examples: list[Example], max_tokens: int):
    packs = packs_of(given_examples, max_tokens)
    assert [e for pack in packs for e in pack.examples_E.tolist()] == list(range(len(given_examples)))
    assert all(pack.tokens <= max_tokens or len(pack.examples_E) == 1 for pack in packs)
    counts = [n for pack in packs for n in np.bincount(pack.example_N, minlength=len(pack.examples_E)).tolist()]
    assert counts == [example.sampled for example in given_examples]


@given(examples)
def test_each_distinct_token_that_is_needed_is_computed_once_and_no_other(given_examples: list[Example]):
    (pack,) = packs_of(given_examples, 1 << 20)
    needed = set[tuple[int, ...]]()
    for row in (row for example in given_examples for row in example.rows):
        last = max(t for t, sampled in enumerate(row.sampled_T) if sampled)
        needed |= {row.ids_T[: t + 1] for t in range(last)}
    assert pack.tokens == len(needed)


def test_siblings_that_begin_alike_are_predicted_from_one_place_and_both_count():
    siblings = [
        Example((Row((1, 2, 3, 4), (False, False, True, True), (0.0, 0.0, -0.1, -0.2), (1.0,) * 4),), 1.0),
        Example((Row((1, 2, 3, 5), (False, False, True, True), (0.0, 0.0, -0.3, -0.4), (1.0,) * 4),), -1.0),
    ]
    (pack,) = packs_of(siblings, 99)
    assert pack.tree.ids_P.tolist() == [1, 2, 3]
    assert pack.at_Q.tolist() == [1, 2]
    assert pack.place_N.tolist() == [0, 1, 0, 1]
    assert pack.target_N.tolist() == [3, 4, 3, 5]
