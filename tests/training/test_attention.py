"""Attention over trees equals attention with the tree's whole mask: values and gradients, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from art_patch.training import attention
from art_patch.training.attention import Forest, Unsupported, tree_attention
from art_patch.training.data.packing import Tree, tree_of

few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float, window: int | None) -> Tensor:
    """The plain way: all scores, all masks, keys repeated for each of their heads."""
    tokens = len(tree.ids_P)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for where in tree.where_R:
        for t, place in enumerate(where):
            first = 0 if window is None else max(0, t + 1 - window)
            seen[place, torch.from_numpy(where[first : t + 1])] = True
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def compare(tree: Tree, *, heads: int, keys: int, width: int, values: int, window: int | None) -> None:
    torch.manual_seed(0)
    tokens = len(tree.ids_P)
    query, key, value = inputs = tuple(
        torch.randn(1, count, tokens, size, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads, width), (keys, width), (keys, values))
    )
    forest = Forest(tree.nodes, torch.from_numpy(tree.depth_P))
    plain = masked_attention(query, key, value, tree, 0.3, window)
    direction = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, inputs, direction)
    tiled, _ = tree_attention(None, query, key, value, None, forest=forest, scaling=0.3, sliding_window=window)
    for ours in (tiled, attention.by_masks(query, key, value, forest, 0.3, window)):
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-10)
        for mine, theirs in zip(torch.autograd.grad(ours, inputs, direction), expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are halved, and scores computed in blocks, at sizes that a test can afford."""
    monkeypatch.setitem(attention._CAUSAL_TOKENS, "cpu", 3)
    monkeypatch.setitem(attention._BLOCK_SCORES, "cpu", 50)
    monkeypatch.setattr(attention, "_MASKED_TOKENS", 12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("width", "values"), [(8, 8), (8, 6)])
def test_equals_attention_with_the_whole_mask(heads: int, keys: int, width: int, values: int, window: int | None):
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [1, 2, 3, 4, 5, 6, 7, 5], [1, 2, 8], [1, 2, 3, 4, 5, 6, 7, 5, 5, 5], [4]]
    tree = tree_of([np.array(row) for row in rows])
    compare(tree, heads=heads, keys=keys, width=width, values=values, window=window)


@settings(max_examples=50)
@given(st.lists(few_tokens, min_size=1, max_size=6), few_tokens, st.sampled_from([None, 3]))
def test_of_any_tree(rows: list[list[int]], prompt: list[int], window: int | None):
    tree = tree_of([np.array(prompt + row) for row in rows])
    compare(tree, heads=2, keys=1, width=4, values=4, window=window)


def test_long_runs_as_they_are_cut_in_earnest():
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 9, 300)
    tree = tree_of([np.concatenate([prompt, draw.integers(0, 9, length)]) for length in (1, 150, 290)])
    compare(tree, heads=2, keys=1, width=4, values=4, window=None)


@pytest.mark.parametrize("asked", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_what_it_cannot_do_it_refuses(asked: dict[str, Any]):
    tree = tree_of([np.array([1, 2])])
    forest = Forest(tree.nodes, torch.from_numpy(tree.depth_P))
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(Unsupported, match=next(iter(asked))):
        tree_attention(None, x, x, x, None, forest=forest, **asked)
