"""Attention over trees equals attention with the tree's whole mask: values and gradients, in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from art_patch.training import attention, flash
from art_patch.training.attention import Forest, Unsupported, tree_attention
from art_patch.training.data.packing import Tree, tree_of
from art_patch.training.flash import by_flash, calls_of, takes, works
from tests.support.flash_stand_in import flash_stand_in

few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float, window: int | None, sink: Tensor | None = None
) -> Tensor:
    """The plain way: all scores, all masks, keys repeated for each of their heads, a sink as one more key."""
    tokens = len(tree.ids_P)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for where in tree.where_R:
        for t, place in enumerate(where):
            first = 0 if window is None else max(0, t + 1 - window)
            seen[place, torch.from_numpy(where[first : t + 1])] = True
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(1, -1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :tokens] @ value).transpose(1, 2)


def compare(
    tree: Tree, *, heads: int, keys: int, width: int, values: int, window: int | None, sinks: bool = False
) -> None:
    torch.manual_seed(0)
    tokens = len(tree.ids_P)
    query, key, value = inputs = tuple(
        torch.randn(1, count, tokens, size, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads, width), (keys, width), (keys, values))
    )
    sink = torch.randn(heads, dtype=torch.float64, requires_grad=True) if sinks else None
    inputs = (*inputs, sink) if sink is not None else inputs
    forest = Forest(tree.nodes, torch.from_numpy(tree.depth_P))
    plain = masked_attention(query, key, value, tree, 0.3, window, sink)
    direction = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, inputs, direction)
    found = [
        tree_attention(None, query, key, value, None, forest=forest, scaling=0.3, sliding_window=window, s_aux=sink)[0]
    ]
    if sink is None:
        found.append(attention.by_masks(query, key, value, forest, 0.3, window))
    if values <= width and (calls := forest.calls(window)):
        found.append(by_flash(query, key, value, calls, 0.3, sink))
    for ours in found:
        torch.testing.assert_close(ours, plain, atol=1e-12, rtol=1e-10)
        for mine, theirs in zip(torch.autograd.grad(ours, inputs, direction), expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.fixture(autouse=True, scope="module")
def kernel() -> Iterator[None]:
    """The kernel of CUDA, which a stand-in computes."""
    with flash_stand_in():
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are halved, and scores computed in blocks, at sizes that a test can afford."""
    monkeypatch.setitem(attention._CAUSAL_TOKENS, "cpu", 3)
    monkeypatch.setitem(attention._BLOCK_SCORES, "cpu", 50)
    monkeypatch.setattr(attention, "_MASKED_TOKENS", 12)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("heads", "keys"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("width", "values"), [(8, 8), (8, 6), (6, 8)])
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_attention_with_the_whole_mask(
    heads: int, keys: int, width: int, values: int, window: int | None, sinks: bool
):
    rows = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], [1, 2, 3, 4, 5, 6, 7, 5], [1, 2, 8], [1, 2, 3, 4, 5, 6, 7, 5, 5, 5], [4]]
    tree = tree_of([np.array(row) for row in rows])
    compare(tree, heads=heads, keys=keys, width=width, values=values, window=window, sinks=sinks)


@settings(max_examples=100)
@given(
    st.lists(few_tokens, min_size=1, max_size=6), few_tokens, st.sampled_from([None, 1, 3, 8]),
    st.sampled_from([(2, 1, 4), (4, 4, 2), (6, 2, 8)]), st.booleans(),
)  # fmt: skip
def test_of_any_tree(
    rows: list[list[int]], prompt: list[int], window: int | None, shape: tuple[int, int, int], sinks: bool
):
    tree = tree_of([np.array(prompt + row) for row in rows])
    heads, keys, width = shape
    compare(tree, heads=heads, keys=keys, width=width, values=width, window=window, sinks=sinks)


def test_long_runs_as_they_are_cut_in_earnest():
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, 9, 300)
    tree = tree_of([np.concatenate([prompt, draw.integers(0, 9, length)]) for length in (1, 150, 290)])
    compare(tree, heads=2, keys=1, width=4, values=4, window=None)


def test_capped_scores_are_refused():
    tree = tree_of([np.array([1, 2])])
    forest = Forest(tree.nodes, torch.from_numpy(tree.depth_P))
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(Unsupported, match="softcap"):
        tree_attention(None, x, x, x, None, forest=forest, softcap=50.0)


def test_one_row_is_one_call_of_the_kernel_and_a_level_of_forks_one_more():
    cpu = torch.device("cpu")
    assert len(calls_of(tree_of([np.arange(40)]).nodes, None, cpu)) == 1
    forks = tree_of([np.array([*range(40), tail, *range(9)]) for tail in range(50, 60)])
    assert [len(calls_of(forks.nodes, window, cpu)) for window in (None, 8, 50)] == [2, 1, 2]
    many = tree_of([np.array([*range(400), 500 + tail]) for tail in range(50)])
    assert calls_of(many.nodes, 390, cpu) == ()  # 50 times as many copies of keys as it has tokens


def test_a_kernel_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch):
    asked = torch.device("cpu"), torch.bfloat16, 4, 2, 64
    assert works.__wrapped__(*asked)
    monkeypatch.setattr(flash, "_windows", lambda _: {"window_size_left": -1, "window_size_right": -1})
    assert not works.__wrapped__(*asked)


def test_what_is_not_on_cuda_is_not_for_the_kernel():
    x = torch.zeros(1, 2, 2, 8, dtype=torch.bfloat16)
    assert not takes(x, x, x)
