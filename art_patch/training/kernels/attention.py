"""Attention over a tree of tokens, exact, with no mask over the tree and no copy of what is shared.

A token attends to its own node up to itself and to every node above it. By node that is two tiles: its tokens on
themselves, causally, and all tokens below it on its tokens, wholly. Each tile is computed by itself; the parts of a
softmax are joined by their log-sum-exp, as FlashAttention does within a row (https://arxiv.org/abs/2205.14135) and Ring
Attention between machines (https://arxiv.org/abs/2310.01889). In the backward each tile sees the joined output and
log-sum-exp, which makes the sum of the tiles' gradients the gradient of the whole; what is shared gets the sum over all
that read it.

Axes: P packed tokens, H key heads, G query heads for each of them, D width of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from art_patch.training.data.tree import Node
from art_patch.training.kernels.attention_tile import Tile, tile_backward, tile_forward

NAME = "art_patch_tree"
"""What the attention is called among those of transformers."""

_CAUSAL_TOKENS = 128
"""Longer runs are halved, because a kernel that is told `causal` computes a large part of the other half too."""

_UNKNOWN = ("softcap", "s_aux")
"""What some models ask of an attention that this one cannot give: capped scores, sinks."""


class Unsupported(Exception):
    """The model asks for an attention that is not this one."""


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of one forward pass, side by side.

    Attributes:
        nodes: of all trees.
        depth_P: place of each token in its row, on the model's device.
    """

    nodes: tuple[Node, ...]
    depth_P: Tensor


def register() -> None:
    """Make the attention known to transformers under `NAME`; a model takes it by `set_attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """The tree is the mask."""


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forest: Forest,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend, as transformers asks for it.

    Args:
        module: the model's attention layer.
        query: (1, H * G, P, D).
        key: (1, H, P, D).
        value: (1, H, P, E).
        attention_mask: none; the forest says who sees what.
        forest: given to the model's `forward`, which hands it down.
        scaling: of the scores; D ** -0.5 unless given.
        sliding_window: tokens that a token sees, itself included; all unless given.
        more: refused where it would change the result.

    Returns:
        (1, P, H * G, E), and no weights.

    Raises:
        Unsupported: the model caps its scores or has sinks.
    """
    if asked := [name for name in _UNKNOWN if more.get(name) is not None]:
        raise Unsupported(f"{type(module).__name__} asks for {asked[0]}")
    heads, tokens, width = query.shape[1:]
    keys = key.shape[1]
    # Heads that share keys stand side by side for each token: a tile without a mask sees them as more queries.
    query_HPGD = query.view(keys, heads // keys, tokens, width).transpose(1, 2).contiguous()
    scale = width**-0.5 if scaling is None else scaling
    out_HPGE: Any = _TreeAttention.apply(query_HPGD, key[0], value[0], forest, scale, sliding_window)
    return out_HPGE.permute(1, 0, 2, 3).reshape(1, tokens, heads, -1), None


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float, window: int | None
    ) -> Tensor:
        keys, tokens, group, _ = query.shape
        # Joined in fp32 at least, whatever the model's precision.
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((keys, tokens, group, value.shape[2]), dtype=exact)
        lse = query.new_full((keys, tokens, group), -torch.inf, dtype=exact)
        q, k, v = _for_tiles(query, key, value)
        for tile in _tiles(forest, scale, window):
            part, part_lse = tile_forward(tile, q[:, tile.queries], k[:, tile.keys], v[:, tile.keys], forest.depth_P)
            _join(out[:, tile.queries], lse[:, tile.queries], part, part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.forest, ctx.scale, ctx.window = forest, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        into = tuple(torch.zeros_like(each, dtype=lse.dtype) for each in (query, key, value))
        grad, q, k, v, o = _for_tiles(grads[0].contiguous(), query, key, value, out)
        for tile in _tiles(ctx.forest, ctx.scale, ctx.window):
            own, shared = tile.queries, tile.keys
            parts = tile_backward(
                tile, grad[:, own], q[:, own], k[:, shared], v[:, shared], o[:, own], lse[:, own], ctx.forest.depth_P
            )
            for whole, part, place in zip(into, parts, (own, shared, shared), strict=True):
                whole[:, place] += part
        return *(whole.to(query.dtype) for whole in into), None, None, None


def _for_tiles(*given: Tensor) -> tuple[Tensor, ...]:
    """In fp32 at least on a CPU: torch's kernel takes up to four times as long over a small tile in bf16."""
    if given[0].device.type != "cpu":
        return given
    return tuple(each.to(torch.promote_types(each.dtype, torch.float32)) for each in given)


def _tiles(forest: Forest, scale: float, window: int | None) -> Iterator[Tile]:
    for node in forest.nodes:
        for own, seen, causal in _within(node.start, node.stop):
            yield Tile(own, seen, causal, scale, window)
    for node in forest.nodes:  # after every token has seen itself: a window may leave it nothing to see up here
        if node.end > node.stop:
            yield Tile(slice(node.stop, node.end), slice(node.start, node.stop), False, scale, window)


def _within(start: int, stop: int) -> Iterator[tuple[slice, slice, bool]]:
    """Yield the tiles of a run of tokens on itself."""
    if stop - start <= _CAUSAL_TOKENS:
        yield slice(start, stop), slice(start, stop), True
        return
    half = (start + stop) // 2
    yield from _within(start, half)
    yield from _within(half, stop)
    yield slice(half, stop), slice(start, half), False


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take one more part of the softmax into `out` and `lse`."""
    joined = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - joined)[..., None]).addcmul_(part.to(out.dtype), torch.exp(part_lse - joined)[..., None])
    lse.copy_(joined)
