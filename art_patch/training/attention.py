"""Computes exact attention over token sequences (rows) that are stored as a tree, so that common beginnings exist once.

A node of the tree is a run of tokens in which no row forks. A token attends to the tokens of its own node up to itself,
and to all tokens of the nodes above. So each node gives two rectangles of attention scores, called tiles: its tokens
attend causally to each other, and all tokens of the nodes below attend to its tokens, without a mask. No mask over the
whole tree and no copy of a shared token is needed.

Each tile is computed by itself. The partial softmax results of a query are joined by their log-sum-exp, as
FlashAttention does within a row (https://arxiv.org/abs/2205.14135) and Ring Attention between machines
(https://arxiv.org/abs/2310.01889). In the backward pass each tile uses the joined output and log-sum-exp. Therefore the
sum of the tiles' gradients is the exact gradient. A shared token gets the sum over all tokens that attend to it.

On a CPU, torch's flash kernel computes a tile. A sliding window, and values of another width than keys, need plain
torch operations, in blocks of bounded size.

On a GPU a small tile is over before Python has started the next one. There `flash` computes many tiles at once, in
float16 and bfloat16. Else trees of up to some thousands of tokens are computed by torch's own attention with a mask,
several small ones at once, and larger trees by tiles of plain torch operations.

Letters in names and shapes are the axes of a tensor: P packed tokens of the whole tree; L queries and M keys of one
tile; H key heads, G query heads for each key head; D width of queries and keys, E width of values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from art_patch.training import flash
from art_patch.training.data.packing import Node

NAME = "art_patch_tree"  # among the attention implementations of transformers

# Longer runs of tokens are halved: a kernel that is told `causal` computes a large part of the masked half too.
_CAUSAL_TOKENS = {"cpu": 128, "gpu": 1024}

# Scores held at once where there is no kernel: 16 MiB in fp32, and 256 MiB on a GPU.
_BLOCK_SCORES = {"cpu": 1 << 22, "gpu": 1 << 26}

# On a GPU: the largest tree for which a mask is made, 512 MiB in bf16, and up to how many tokens trees share a mask.
_MASKED_TREE_TOKENS = 16_384
_MASKED_TOKENS = 2048
_MOST_CALLS = 12  # of the flash kernel; a deeper tree is computed with a mask if it is small enough

_aten: Any = torch.ops.aten


class Unsupported(Exception):
    """Raised when a model needs a variant of attention that this module does not compute, such as capped scores."""


@dataclass(frozen=True, slots=True)
class Forest:
    """The trees of token sequences (rows) that one forward pass computes."""

    nodes: tuple[Node, ...]  # nodes of all trees; their numbers are positions among the P packed tokens
    depth_P: Tensor  # index of each packed token in its row, as a tensor on the model's device
    # Masks that were made for `by_masks`: all layers need the same, or two, if some have a window.
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict, compare=False)
    made_calls: dict[int | None, tuple[flash.Call, ...]] = field(default_factory=dict, compare=False)

    def calls(self, window: int | None) -> tuple[flash.Call, ...]:
        """Returns the calls of the flash kernel that compute all trees; none if it is not for them."""
        if window not in self.made_calls:
            self.made_calls[window] = flash.calls_of(self.nodes, window, self.depth_P.device)
        return self.made_calls[window]

    def runs(self) -> Iterator[slice]:
        """Yields the packed tokens of each tree, and of several small ones together."""
        first = 0
        roots = [node for node in self.nodes if node.depth == 0]
        for root, after in zip(roots, [*roots[1:], None], strict=True):
            if after is None or after.end - first > _MASKED_TOKENS:
                yield slice(first, root.end)
                first = root.end

    def mask(self, run: slice, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns what is added to the scores (L, L) of a run's L tokens: 0 where a query sees a key, else -inf."""
        if (found := self.masks.get((run.start, window, dtype))) is not None:
            return found
        device, tokens = self.depth_P.device, run.stop - run.start
        own = [node for node in self.nodes if run.start <= node.start < run.stop]
        ends = torch.tensor([node.end - run.start for node in own])
        end_M = ends.repeat_interleave(torch.tensor([node.stop - node.start for node in own])).to(device)
        place_L = torch.arange(tokens, device=device)
        # A token is seen by those that follow it in its node, and by all of the nodes below.
        seen_LM = (place_L[:, None] >= place_L) & (place_L[:, None] < end_M)
        if window is not None:
            depth_L = self.depth_P[run]
            seen_LM &= depth_L[:, None] - depth_L < window
        # Rows begin at multiples of 16 bytes: else the kernel would copy the mask in each layer.
        mask = torch.full((tokens, -(-tokens // 8) * 8), -torch.inf, dtype=dtype, device=device)[:, :tokens]
        self.masks[run.start, window, dtype] = mask.masked_fill_(seen_LM, 0.0)
        return mask


@dataclass(frozen=True, slots=True)
class _Tile:
    """A rectangle of attention: a run of packed tokens (queries) attends to a run of packed tokens (keys)."""

    queries: slice
    keys: slice
    causal: bool  # both runs are the same and each token sees those up to itself; otherwise each query sees all keys
    scale: float
    window: int | None  # number of tokens that a token sees, itself included; `None` is no bound


def register() -> None:
    """Registers `tree_attention` in transformers; a model uses it after `model.set_attn_implementation(NAME)`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """The tree is the mask."""


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, forest: Forest,
    scaling: float | None = None, sliding_window: int | None = None, s_aux: Tensor | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes attention over trees, with the signature that transformers expects of an attention function.

    Shapes: query (1, H * G, P, D), key (1, H, P, D), value (1, H, P, E). Returns the output (1, P, H * G, E), and
    `None` in place of the attention weights. The `forest`, which the caller passes to the model's `forward`, takes the
    place of the mask. `scaling` is the factor of the scores, D ** -0.5 by default. `sliding_window` is the number of
    tokens that a token attends to, including itself. `s_aux` has an attention sink for each query head: one more score,
    without a value. Capped scores (`softcap`) raise `Unsupported`.
    """
    if more.get("softcap") is not None:
        raise Unsupported(f"{type(module).__name__} asks for softcap")
    if _place(query) == "gpu":
        masked = s_aux is None and all(run.stop - run.start <= _MASKED_TREE_TOKENS for run in forest.runs())
        calls = forest.calls(sliding_window) if flash.takes(query, key, value) else ()
        if calls and not (masked and len(calls) > _MOST_CALLS):
            return flash.by_flash(query, key, value, calls, scaling, s_aux), None
        if masked:
            return by_masks(query, key, value, forest, scaling, sliding_window), None
    return by_tiles(query, key, value, forest, scaling, sliding_window, s_aux), None


def by_tiles(
    query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float | None, window: int | None,
    sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes what `tree_attention` does, of the same shapes, tile by tile."""
    heads, tokens, width = query.shape[1:]
    keys = key.shape[1]
    # Heads that share keys stand side by side for each token: a tile without a mask sees them as more queries.
    query_HPGD = query.view(keys, heads // keys, tokens, width).transpose(1, 2).contiguous()
    sink_H1G = None if sink is None else sink.view(keys, 1, -1)
    out_HPGE: Any = _TreeAttention.apply(
        query_HPGD, key[0], value[0], forest, width**-0.5 if scale is None else scale, window, sink_H1G
    )
    return out_HPGE.permute(1, 0, 2, 3).reshape(1, tokens, heads, -1)


def by_masks(
    query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float | None, window: int | None
) -> Tensor:
    """Computes what `tree_attention` does, of the same shapes, by torch's attention with masks."""
    group = query.shape[1] // key.shape[1]
    if group > 1:  # torch's kernel for masks wants as many heads of keys as of queries
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    parts = [
        scaled_dot_product_attention(
            query[:, :, run], key[:, :, run], value[:, :, run],
            attn_mask=forest.mask(run, window, query.dtype), scale=scale,
        )
        for run in forest.runs()
    ]  # fmt: skip
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, forest: Forest, scale: float, window: int | None,
        sink: Tensor | None,
    ) -> Tensor:  # fmt: skip
        keys, tokens, group, _ = query.shape
        # Joined in fp32 at least, whatever the model's precision: every join rounds, and a deep node joins many tiles.
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((keys, tokens, group, value.shape[2]), dtype=exact)
        lse = query.new_full((keys, tokens, group), -torch.inf, dtype=exact)
        q, k, v = _for_tiles(query, key, value)
        for tile in _tiles(forest, scale, window, _place(query)):
            part, part_lse = tile_forward(tile, q[:, tile.queries], k[:, tile.keys], v[:, tile.keys], forest.depth_P)
            _join(out[:, tile.queries], lse[:, tile.queries], part, part_lse)
        if sink is not None:
            out, lse = flash.with_sink(out, lse, sink)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sink)
        ctx.forest, ctx.scale, ctx.window = forest, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse, sink = ctx.saved_tensors
        into = tuple(torch.zeros_like(each, dtype=lse.dtype) for each in (query, key, value))
        grad, q, k, v, o = _for_tiles(grads[0].contiguous(), query, key, value, out)
        for tile in _tiles(ctx.forest, ctx.scale, ctx.window, _place(query)):
            own, shared = tile.queries, tile.keys
            parts = tile_backward(
                tile, grad[:, own], q[:, own], k[:, shared], v[:, shared], o[:, own], lse[:, own], ctx.forest.depth_P
            )
            for whole, part, place in zip(into, parts, (own, shared, shared), strict=True):
                whole[:, place] += part
        of_sink = flash.of_sink(grads[0], out, lse, sink) if ctx.needs_input_grad[6] else None
        return *(whole.to(query.dtype) for whole in into), None, None, None, of_sink


def _place(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "gpu"


def _for_tiles(*given: Tensor) -> tuple[Tensor, ...]:
    # On a CPU torch's kernel takes up to four times as long over a small tile in bf16 as in fp32.
    if _place(given[0]) == "gpu":
        return given
    return tuple(each.to(torch.promote_types(each.dtype, torch.float32)) for each in given)


def _tiles(forest: Forest, scale: float, window: int | None, place: str) -> Iterator[_Tile]:
    for node in forest.nodes:
        for own, seen, causal in _within(node.start, node.stop, _CAUSAL_TOKENS[place]):
            yield _Tile(own, seen, causal, scale, window)
    # Only after every token has seen itself: under a window a token may see nothing of the nodes above, and joining two
    # parts that are both empty would give NaN.
    for node in forest.nodes:
        if node.end > node.stop:
            yield _Tile(slice(node.stop, node.end), slice(node.start, node.stop), False, scale, window)


def _within(start: int, stop: int, most: int) -> Iterator[tuple[slice, slice, bool]]:
    """Yields queries, keys and `causal` of the tiles of a run of tokens on itself."""
    if stop - start <= most:
        yield slice(start, stop), slice(start, stop), True
        return
    half = (start + stop) // 2
    yield from _within(start, half, most)
    yield from _within(half, stop, most)
    yield slice(half, stop), slice(start, half), False


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Joins one more part of the softmax into `out` and `lse`, in place."""
    joined = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - joined)[..., None]).addcmul_(part.to(out.dtype), torch.exp(part_lse - joined)[..., None])
    lse.copy_(joined)


def tile_forward(tile: _Tile, query: Tensor, key: Tensor, value: Tensor, depth_P: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output (H, L, G, E) of one tile, a rectangle of attention, and its log-sum-exp (H, L, G).

    The log-sum-exp is -inf for a query that attends to no key of the tile. Shapes: query (H, L, G, D), key (H, M, D),
    value (H, M, E). `depth_P` is the index of each packed token in its row (token sequence).
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
        # Where a query sees nothing, -inf less -inf would be NaN, and every weight must be 0.
        finite = torch.where(lse[:, block] == -torch.inf, 0.0, lse[:, block])
        weights = torch.exp(scores - finite[..., None]).to(value.dtype)
        out[:, block] = torch.einsum("hlgm,hme->hlge", weights, value)
    return out, lse


def tile_backward(
    tile: _Tile, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, depth_P: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the contributions of one tile, a rectangle of attention, to the gradients of queries, keys and values.

    `grad` (gradient of the output), `out` (both H, L, G, E) and `lse` (H, L, G) belong to the complete softmax, which
    is joined over all tiles of these queries. The other arguments are those of `tile_forward`.
    """
    if _has_kernel(tile, query, value):
        q, k, v = _for_kernel(tile, query, key, value)
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _queries(tile, grad), q, k, v, _queries(tile, out), _queries(tile, lse[..., None])[..., 0].contiguous(),
            0.0, tile.causal, scale=tile.scale,
        )  # fmt: skip
        return _from_kernel(tile, of_query, query), of_key.sum(0), of_value.sum(0)
    of_query, of_key, of_value = (torch.zeros_like(each, dtype=lse.dtype) for each in (query, key, value))
    # As in FlashAttention, the softmax's derivative needs only grad . out of a query, no weights of other tiles.
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    for block in _blocks(query, key):
        weights = torch.exp(_scores(tile, query[:, block], key, depth_P, block) - lse[:, block, :, None])
        of_value += torch.einsum("hlgm,hlge->hme", weights.to(grad.dtype), grad[:, block])
        of_scores = torch.einsum("hlge,hme->hlgm", grad[:, block], value) - delta[:, block]
        of_scores = (of_scores * weights * tile.scale).to(query.dtype)
        of_query[:, block] = torch.einsum("hlgm,hmd->hlgd", of_scores, key)
        of_key += torch.einsum("hlgm,hlgd->hmd", of_scores, query[:, block])
    return of_query, of_key, of_value


def _has_kernel(tile: _Tile, query: Tensor, value: Tensor) -> bool:
    return _place(query) == "cpu" and tile.window is None and query.shape[-1] == value.shape[-1]


def _for_kernel(tile: _Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = _queries(tile, query)
    return q, key.expand(len(q), *key.shape), value.expand(len(q), *value.shape)


def _queries(tile: _Tile, query: Tensor) -> Tensor:
    # The kernel wants (batch, H, queries, D). Under a causal mask the order of queries matters, so heads that share
    # keys become a batch of G; without one they are simply G times as many queries.
    return query.permute(2, 0, 1, 3) if tile.causal else query.flatten(1, 2)[None]


def _from_kernel(tile: _Tile, result: Tensor, query: Tensor) -> Tensor:
    """Undoes `_queries`: back to (H, L, G, -1)."""
    return result.permute(1, 2, 0, 3) if tile.causal else result[0].unflatten(1, query.shape[1:3])


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    heads, queries, group, _ = query.shape
    step = max(1, _BLOCK_SCORES[_place(query)] // (heads * group * key.shape[1]))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def _scores(tile: _Tile, query: Tensor, key: Tensor, depth_P: Tensor, block: slice) -> Tensor:
    """Returns the scores (H, L, G, M) of a block of queries, at least fp32, -inf where a query does not see a key."""
    scores = torch.einsum("hlgd,hmd->hlgm", query, key)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * tile.scale
    # Distance in the row, not among the packed tokens: a window counts the tokens that this row has.
    ahead_LM = depth_P[tile.queries][block][:, None] - depth_P[tile.keys][None, :]
    if tile.causal:
        scores = scores.masked_fill((ahead_LM < 0)[:, None, :], -torch.inf)
    if tile.window is not None:
        scores = scores.masked_fill((ahead_LM >= tile.window)[:, None, :], -torch.inf)
    return scores
