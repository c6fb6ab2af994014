"""Computes attention over trees of rows with torch's FlashAttention on CUDA: no scores are kept in memory.

The kernel takes many pairs of runs of tokens (queries, keys) in one call, and returns the log-sum-exp of each query's
scores. A tree is cut into calls in one of two ways:

- Without a window: in the first call each node attends to itself, causally. Then there is a call for each level of
  the tree, in which the tokens below each node of that level attend to all tokens of the node. The parts are joined by
  their log-sum-exp. In the backward pass each call gets the joined output and log-sum-exp, so that the sum of the
  calls' gradients is exact, as in Ring Attention (https://arxiv.org/abs/2310.01889).
- With a window: in a single call, each node attends to copies of as many tokens above it as the window reaches, and to
  itself.

An attention sink is one more score in the softmax, which has no value: the joined log-sum-exp contains it, and the
output is scaled down by its share.

The kernel takes float16 and bfloat16, and widths up to 256. `works` tries it once on small trees beside plain torch; if
it is missing or computes something else, attention is computed as in `attention`.

Letters in names and shapes are the axes of a tensor: P packed tokens of the whole tree; Q query heads, H key heads; D
width of queries and keys, E width of values.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from art_patch._lib.events import event
from art_patch.training.data.packing import Ids, Node

_MOST_COPIES = 8  # keys that are copied for a window, for each token; more would need too much memory

_WORKS = 0.03  # relative distance from plain float32 that the rounding of bfloat16 explains

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Call:
    """Pairs of runs of tokens that one call of the kernel computes: each run of queries attends to one run of keys."""

    queries: slice | Tensor  # places of the queries among the P tokens, one run after the other
    keys: slice | Tensor  # places of the keys; with a window, a token may be here many times
    edges: tuple[Tensor, Tensor]  # where runs of queries and of keys begin, and where the last one ends
    longest: tuple[int, int]  # tokens of the longest run of queries and of keys
    causal: bool  # a query sees the keys up to itself, where both runs end with the same token; else it sees all
    window: int | None = None  # number of keys that a query sees at most, itself included


def calls_of(nodes: Sequence[Node], window: int | None, device: torch.device) -> tuple[Call, ...]:
    """Cuts the trees with these nodes into calls; into none if the window needs too many copies."""
    own = [np.arange(node.start, node.stop) for node in nodes]
    paths = _paths(nodes)
    if window is not None and window < max(node.depth + node.stop - node.start for node in nodes):
        seen = [_tail(path, own, window - 1) for path in paths]
        if sum(map(len, seen)) > _MOST_COPIES * nodes[-1].stop:
            return ()
        return (_call(own, [np.concatenate(pair) for pair in zip(seen, own, strict=True)], True, window, device),)
    calls = [_call(own, own, True, None, device)]
    for level in range(1 + max(map(len, paths))):
        parents = [node for node, path in zip(nodes, paths, strict=True) if len(path) == level and node.end > node.stop]
        if parents:
            below = [np.arange(node.stop, node.end) for node in parents]
            calls.append(
                _call(below, [np.arange(node.start, node.stop) for node in parents], False, None, device)
            )  # fmt: skip
    return tuple(calls)


def _paths(nodes: Sequence[Node]) -> list[list[int]]:
    """Returns for each node the indices of the nodes above it, from the root on."""
    paths: list[list[int]] = []
    path: list[int] = []
    for index, node in enumerate(nodes):
        while path and nodes[path[-1]].end <= node.start:
            path.pop()
        paths.append(path.copy())
        path.append(index)
    return paths


def _tail(path: Sequence[int], own: Sequence[Ids], tokens: int) -> Ids:
    """Returns the places of the last tokens on a path of nodes, at most so many."""
    parts: list[Ids] = []
    for index in reversed(path):
        if tokens <= 0:
            break
        parts.append(own[index][-tokens:])
        tokens -= len(parts[-1])
    return np.concatenate([np.empty(0, np.int64), *reversed(parts)])


def _call(queries: list[Ids], keys: list[Ids], causal: bool, window: int | None, device: torch.device) -> Call:
    def places(runs: list[Ids]) -> slice | Tensor:
        joined = np.concatenate(runs)
        first, last = int(joined[0]), int(joined[-1])
        # Where the runs follow each other, a view does.
        if last + 1 - first == len(joined) and bool((np.diff(joined) == 1).all()):
            return slice(first, last + 1)
        return torch.from_numpy(joined).to(device)

    lengths = [[len(run) for run in runs] for runs in (queries, keys)]
    edges = tuple(torch.tensor([0, *np.cumsum(each)], dtype=torch.int32, device=device) for each in lengths)
    # At least 2: told that no run is longer than 1, the kernel lays out its log-sum-exp in another way.
    longest = tuple(max(2, *each) for each in lengths)
    return Call(places(queries), places(keys), edges, longest, causal, window)  # type: ignore[arg-type]


def by_flash(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[Call], scale: float | None, sink: Tensor | None = None
) -> Tensor:
    """Computes attention of packed tokens: query (1, Q, P, D), key (1, H, P, D), value (1, H, P, E); (1, P, Q, E).

    `scale` is the factor of the scores, D ** -0.5 by default; `sink` has a score for each query head (Q).
    """
    width, kept = query.shape[-1], value.shape[-1]
    given = [each[0].transpose(0, 1) for each in (query, key, pad(value, (0, width - kept)))]
    out: Any = _ByFlash.apply(*given, tuple(calls), width**-0.5 if scale is None else scale, sink)
    return out[None, ..., :kept]


class _ByFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: tuple[Call, ...], scale: float, sink: Tensor | None
    ) -> Tensor:
        dtype = query.dtype
        out, lse = _forward(calls[0], query, key, value, scale)
        # Joined in fp32 at least: every join rounds, and a deep node joins many parts.
        if len(calls) > 1 or sink is not None:
            out = out.to(lse.dtype)
        for call in calls[1:]:
            part, part_lse = _forward(call, query, key, value, scale)
            before = lse[:, call.queries]
            joined = torch.logaddexp(before, part_lse)
            mine = out[call.queries] * _share(before, joined)
            out[call.queries] = mine.addcmul_(part.to(out.dtype), _share(part_lse, joined))
            lse[:, call.queries] = joined
        if sink is not None:
            out, lse_PQ = with_sink(out, lse.T, sink)
            lse = lse_PQ.T.contiguous()
        out = out.to(dtype)
        ctx.save_for_backward(query, key, value, out, lse, sink)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, lse, sink = ctx.saved_tensors
        grad, given = grads[0].contiguous(), (query, key, value)
        into_sink = of_sink(grad, out, lse.T, sink) if ctx.needs_input_grad[5] else None
        if len(ctx.calls) == 1 and isinstance(ctx.calls[0].keys, slice):
            return *_backward(ctx.calls[0], grad, *given, out, lse, ctx.scale), None, None, into_sink
        into = [torch.zeros_like(each, dtype=lse.dtype) for each in given]
        for call in ctx.calls:
            parts = _backward(call, grad, *given, out, lse, ctx.scale)
            for whole, part, places in zip(into, parts, (call.queries, call.keys, call.keys), strict=True):
                if isinstance(places, slice):
                    whole[places] += part
                else:
                    whole.index_add_(0, places, part.to(whole.dtype))
        return *(whole.to(each.dtype) for whole, each in zip(into, given, strict=True)), None, None, into_sink


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of a softmax to which a sink is added; `sink` is broadcast to the latter."""
    joined = torch.logaddexp(lse, sink.to(lse.dtype))
    return out * torch.exp(lse - joined)[..., None], joined


def of_sink(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Returns the gradient of a sink; the other arguments are those of the complete softmax, the sink included."""
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(torch.exp(sink.to(lse.dtype) - lse) * delta).sum_to_size(sink.shape).to(sink.dtype)


def _share(part_QP: Tensor, whole_QP: Tensor) -> Tensor:
    """Returns the share (P, Q, 1) that a part of a softmax has, from the logarithms of the sums."""
    return torch.exp(part_QP - whole_QP).T[..., None]


def _edges(call: Call) -> tuple[Any, ...]:
    return *call.edges, *call.longest, 0.0, call.causal and call.window is None


def _windows(call: Call) -> dict[str, int]:
    if call.window is None:
        return {"window_size_left": -1, "window_size_right": -1}
    return {"window_size_left": call.window - 1, "window_size_right": 0}


def _forward(call: Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns a call's output (queries, Q, D) and log-sum-exp (Q, queries)."""
    out, lse, *_ = _aten._flash_attention_forward(
        query[call.queries], key[call.keys], value[call.keys], *_edges(call), False, scale=scale, **_windows(call)
    )
    return out, lse


def _backward(
    call: Call, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a call's part of the gradients; `grad`, `out` and `lse` are those of the complete softmax."""
    mine, shared = call.queries, call.keys
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    return _aten._flash_attention_backward(
        grad[mine], query[mine], key[shared], value[shared], out[mine], lse[:, mine].contiguous(), *_edges(call),
        *no_dropout, scale=scale, **_windows(call),
    )  # fmt: skip


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes such queries, keys and values, and computes what it should on this machine."""
    width = query.shape[-1]
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if width % 8 or width > 256 or value.shape[-1] > width:
        return False
    return works(query.device, query.dtype, query.shape[1], key.shape[1], width)


@lru_cache
@torch.enable_grad()
def works(device: torch.device, dtype: torch.dtype, query_heads: int, heads: int, width: int) -> bool:
    """Tries the kernel once in each process, outputs and gradients, on a small tree with and without a window."""
    nodes = (Node(0, 70, 220, 0), Node(70, 130, 130, 70), Node(130, 180, 220, 70), Node(180, 220, 220, 120))
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, count, 220, width) for count in (query_heads, heads, heads)]
    inputs = [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes]
    sink = torch.randn(query_heads, generator=draw).to(device, dtype).requires_grad_()
    grad = torch.randn((1, 220, query_heads, width), generator=draw).to(device, dtype)
    why = ""
    try:
        for window in (None, 50):
            found = by_flash(*inputs, calls_of(nodes, window, device), None, sink)  # type: ignore[arg-type]
            plain = _plainly(*(each.float() for each in (*inputs, sink)), nodes, window)  # type: ignore[call-arg]
            grads = [torch.autograd.grad(out, (*inputs, sink), grad.to(out.dtype)) for out in (found, plain)]
            gaps = [_gap(*pair) for pair in zip((found.detach(), *grads[0]), (plain.detach(), *grads[1]), strict=True)]
            if not all(gap <= _WORKS for gap in gaps):  # NaN is a difference too
                why = f"it differs from plain torch by {gaps}"
    except (RuntimeError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        event("training", "torch's FlashAttention is not used: %s", why, level=logging.WARNING)
    return not why


def _gap(found: Tensor, plain: Tensor) -> float:
    return float((found.float() - plain.float()).norm() / plain.float().norm())


def _plainly(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, nodes: Sequence[Node], window: int | None
) -> Tensor:
    """Computes what `by_flash` does with all scores in memory."""
    tokens = query.shape[2]
    depth_P = torch.zeros(tokens, dtype=torch.int64)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for node in nodes:
        depth_P[node.start : node.stop] = torch.arange(node.depth, node.depth + node.stop - node.start)
        seen[node.start : node.end, node.start : node.stop] = True
    seen &= torch.ones_like(seen).tril()
    if window is not None:
        seen &= depth_P[:, None] - depth_P < window
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen.to(query.device), -torch.inf)
    scores = torch.cat([scores, sink[None, :, None, None].expand(1, -1, tokens, 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2)
