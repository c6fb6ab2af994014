"""A stand-in for torch's FlashAttention kernel on a CPU, in any precision: what CUDA has under the same name.

It keeps the operator's schema, so a call that CUDA's kernel would refuse for its arguments fails here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from art_patch.training import attention, flash


@contextmanager
def flash_stand_in() -> Iterator[None]:
    """While it runs, `torch.ops.aten._flash_attention_forward` and its backward compute on the CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_backward", _backward)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """While it runs, attention over trees is computed as on CUDA, in any precision, by the stand-in."""
    before = attention._place, flash.takes
    attention._place, flash.takes = (lambda _: "gpu"), (lambda *_: True)
    try:
        with flash_stand_in():
            yield
    finally:
        attention._place, flash.takes = before


def _runs(query_edges: Tensor, key_edges: Tensor) -> Iterator[tuple[slice, slice]]:
    for (q, q_end), (k, k_end) in zip(pairwise(query_edges.tolist()), pairwise(key_edges.tolist()), strict=True):
        yield slice(q, q_end), slice(k, k_end)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float, left: int, right: int) -> Tensor:
    """Scores (heads, queries, keys), masked from the lower right corner, as FlashAttention 2 does."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    queries, keys = scores.shape[1:]
    ahead = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    hidden = torch.zeros(queries, keys, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= ahead < -max(right, 0)
    if left >= 0:
        hidden |= ahead > left
    return scores.masked_fill(hidden, -torch.inf)


def _checked(query: Tensor, key: Tensor, value: Tensor, edges: tuple[Tensor, Tensor], most: tuple[int, int]) -> int:
    """The group of query heads of a key head; what CUDA's kernel refuses is refused."""
    assert query.dim() == 3 and query.shape[1] % key.shape[1] == 0
    assert query.shape[2] == key.shape[2] == value.shape[2] and all(x.stride(-1) == 1 for x in (query, key, value))
    assert [int(each[-1]) for each in edges] == [len(query), len(key)]
    assert all(each.dtype == torch.int32 and int(each.diff().min()) > 0 for each in edges)
    assert all(int(each.diff().max()) <= count for each, count in zip(edges, most, strict=True))
    return query.shape[1] // key.shape[1]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, query_edges: Tensor, key_edges: Tensor, most_q: int, most_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    group = _checked(query, key, value, (query_edges, key_edges), (most_q, most_k))
    exact = torch.promote_types(query.dtype, torch.float32)
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query), dtype=exact)
    for own, seen in _runs(query_edges, key_edges):
        q, k, v = (each.to(exact) for each in (query[own], key[seen], value[seen]))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = _scores(q, k, causal, scale, window_size_left, window_size_right)
        lse[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
    nothing = torch.empty(0)
    return out, lse, nothing, nothing, nothing


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, query_edges: Tensor,
    key_edges: Tensor, most_q: int, most_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *,
    scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    group = _checked(query, key, value, (query_edges, key_edges), (most_q, most_k))
    assert lse.is_contiguous() and lse.shape == (query.shape[1], len(query)) and grad.stride(-1) == 1
    into = tuple(torch.zeros(each.shape, dtype=lse.dtype) for each in (query, key, value))
    for own, seen in _runs(query_edges, key_edges):
        q, k, v, g, o = (each.to(lse.dtype) for each in (query[own], key[seen], value[seen], grad[own], out[own]))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.exp(_scores(q, k, causal, scale, window_size_left, window_size_right) - lse[:, own, None])
        of_scores = torch.einsum("qhd,khd->hqk", g, v) - (g * o).sum(-1).T[..., None]
        of_scores = of_scores * weights * scale
        into[0][own] += torch.einsum("hqk,khd->qhd", of_scores, k)
        of_heads = torch.einsum("hqk,qhd->khd", of_scores, q), torch.einsum("hqk,qhd->khd", weights, g)
        for whole, part in zip(into[1:], of_heads, strict=True):
            whole[seen] += part.unflatten(1, (-1, group)).sum(2)
    return tuple(whole.to(each.dtype) for whole, each in zip(into, (query, key, value), strict=True))
