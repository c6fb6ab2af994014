"""One rectangle of attention: some queries on some keys, with the log-sum-exp that joins it to others.

On a CPU it is torch's flash kernel. Where that has no answer (another device, a sliding window, values of another width
than keys) the scores are computed, in blocks of bounded size.

Axes: H key heads, G query heads for each of them, L queries, M keys, D width of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK_SCORES = 1 << 22
"""Scores held at once without a kernel: 16 MiB in fp32."""

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Tile:
    """Which tokens attend to which.

    Attributes:
        queries: among the packed tokens.
        keys: among the packed tokens.
        causal: queries and keys are the same run; each sees those up to itself. Otherwise each sees all.
        scale: of the scores.
        window: tokens that a token sees, itself included; `None` is no bound.
    """

    queries: slice
    keys: slice
    causal: bool
    scale: float
    window: int | None


def tile_forward(tile: Tile, query: Tensor, key: Tensor, value: Tensor, depth_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (H, L, G, E) and the log-sum-exp (H, L, G), which is -inf where nothing is seen.

    Args:
        tile: what attends to what.
        query: (H, L, G, D).
        key: (H, M, D).
        value: (H, M, E).
        depth_P: place of every packed token in its row.
    """
    if _has_kernel(tile, query, value):
        q, k, v = _for_kernel(tile, query, key, value)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, tile.causal, scale=tile.scale)
        return _from_kernel(tile, out, query), _from_kernel(tile, lse[..., None], query)[..., 0]
    out = query.new_empty((*query.shape[:3], value.shape[2]))
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for block in _blocks(query, key):
        scores = _scores(tile, query[:, block], key, depth_P, block)
        lse[:, block] = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - _finite(lse[:, block])[..., None]).to(value.dtype)
        out[:, block] = torch.einsum("hlgm,hme->hlge", weights, value)
    return out, lse


def tile_backward(
    tile: Tile, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, depth_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    Args:
        tile: what attends to what.
        grad: (H, L, G, E), of the joined output.
        query: (H, L, G, D).
        key: (H, M, D).
        value: (H, M, E).
        out: (H, L, G, E), joined over all tiles of these queries.
        lse: (H, L, G), joined likewise.
        depth_P: place of every packed token in its row.
    """
    if _has_kernel(tile, query, value):
        q, k, v = _for_kernel(tile, query, key, value)
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _queries(tile, grad), q, k, v, _queries(tile, out), _queries(tile, lse[..., None])[..., 0].contiguous(),
            0.0, tile.causal, scale=tile.scale,
        )  # fmt: skip
        return _from_kernel(tile, of_query, query), of_key.sum(0), of_value.sum(0)
    of_query, of_key, of_value = (torch.zeros_like(each, dtype=lse.dtype) for each in (query, key, value))
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    for block in _blocks(query, key):
        weights = torch.exp(_scores(tile, query[:, block], key, depth_P, block) - lse[:, block, :, None])
        of_value += torch.einsum("hlgm,hlge->hme", weights.to(grad.dtype), grad[:, block])
        of_scores = torch.einsum("hlge,hme->hlgm", grad[:, block], value) - delta[:, block]
        of_scores = (of_scores * weights * tile.scale).to(query.dtype)
        of_query[:, block] = torch.einsum("hlgm,hmd->hlgd", of_scores, key)
        of_key += torch.einsum("hlgm,hlgd->hmd", of_scores, query[:, block])
    return of_query, of_key, of_value


def _has_kernel(tile: Tile, query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and tile.window is None and query.shape[-1] == value.shape[-1]


def _for_kernel(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = _queries(tile, query)
    return q, key.expand(len(q), *key.shape), value.expand(len(q), *value.shape)


def _queries(tile: Tile, query: Tensor) -> Tensor:
    """(H, L, G, D) as the kernel takes it: heads that share keys are a batch if order matters, else more queries."""
    return query.permute(2, 0, 1, 3) if tile.causal else query.flatten(1, 2)[None]


def _from_kernel(tile: Tile, result: Tensor, query: Tensor) -> Tensor:
    """Back to (H, L, G, -1)."""
    return result.permute(1, 2, 0, 3) if tile.causal else result[0].unflatten(1, query.shape[1:3])


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    heads, queries, group, _ = query.shape
    step = max(1, _BLOCK_SCORES // (heads * group * key.shape[1]))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def _scores(tile: Tile, query: Tensor, key: Tensor, depth_P: Tensor, block: slice) -> Tensor:
    """(H, L, G, M), at least fp32, -inf where a query does not see a key."""
    scores = torch.einsum("hlgd,hmd->hlgm", query, key)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * tile.scale
    depth_L, depth_M = depth_P[tile.queries][block], depth_P[tile.keys]
    ahead_LM = depth_L[:, None] - depth_M[None, :]
    if tile.causal:
        scores = scores.masked_fill((ahead_LM < 0)[:, None, :], -torch.inf)
    if tile.window is not None:
        scores = scores.masked_fill((ahead_LM >= tile.window)[:, None, :], -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    """Where nothing is seen every weight is to be 0 and not NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)
