"""Trees of rows: every distinct prefix once, every row whole, and two rectangles a node say who sees whom."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.training.data.packing import Ids, Node, tree_of

rows_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def arrays(rows: list[list[int]]) -> list[Ids]:
    return [np.array(row, dtype=np.int64) for row in rows]


@given(rows_of_few_tokens)
def test_each_distinct_prefix_is_computed_once(rows: list[list[int]]):
    prefixes = {tuple(row[: t + 1]) for row in rows for t in range(len(row))}
    assert len(tree_of(arrays(rows)).ids_P) == len(prefixes)


@given(rows_of_few_tokens)
def test_every_row_reads_back_whole_and_at_its_places(rows: list[list[int]]):
    tree = tree_of(arrays(rows))
    assert [tree.ids_P[where].tolist() for where in tree.where_R] == rows
    assert [tree.depth_P[where].tolist() for where in tree.where_R] == [list(range(len(row))) for row in rows]


@given(rows_of_few_tokens)
def test_a_token_sees_what_is_before_it_in_its_rows_and_nothing_else(rows: list[list[int]]):
    tree = tree_of(arrays(rows))
    tokens = len(tree.ids_P)
    by_rows = np.zeros((tokens, tokens), dtype=int)
    for where in tree.where_R:
        for t, place in enumerate(where):
            by_rows[place, where[: t + 1]] = 1
    by_nodes = np.zeros((tokens, tokens), dtype=int)
    for node in tree.nodes:
        for place in range(node.start, node.stop):
            by_nodes[place, node.start : place + 1] += 1
        by_nodes[node.stop : node.end, node.start : node.stop] += 1
    assert by_nodes.tolist() == by_rows.tolist()


def test_a_prompt_with_two_answers_is_three_nodes():
    tree = tree_of(arrays([[7, 8, 9, 1, 2], [7, 8, 9, 3]]))
    assert tree.ids_P.tolist() == [7, 8, 9, 1, 2, 3]
    assert tree.nodes == (Node(0, 3, 6, 0), Node(3, 5, 5, 3), Node(5, 6, 6, 3))


@pytest.mark.parametrize("copies", [1, 3])
def test_a_row_that_comes_again_costs_nothing(copies: int):
    tree = tree_of(arrays([[1, 2, 3]] * copies))
    assert tree.nodes == (Node(0, 3, 3, 0),)
    assert [where.tolist() for where in tree.where_R] == [[0, 1, 2]] * copies
