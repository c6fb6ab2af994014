"""Rows that share beginnings, as one tree in which every shared token stands once. Pure, no torch.

Siblings share a prompt, the turns of a forked conversation share all that came before the fork. A causal model
computes the same for a token wherever the tokens before it are the same, so each such token is computed once and
every row below it reads it. The tree is a radix trie over token ids: a node is a run of tokens without a fork.

Tokens are laid out depth first, so the tokens below a node follow it without a gap: attention needs no mask over the
tree, only two rectangles for each node (its own tokens, causally; everything below it on its own tokens, wholly).

TRL's AsyncGRPO keys its trie the same way (`experimental/async_grpo/packing.py`); its attention needs FlashAttention 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens; positions in the packed order.

    Attributes:
        start: first token.
        stop: one past its last token.
        end: one past the last token below it.
        depth: tokens above it.
    """

    start: int
    stop: int
    end: int
    depth: int


@dataclass(frozen=True, slots=True)
class Tree:
    """P distinct tokens of R rows.

    Attributes:
        ids_P: token ids.
        depth_P: place of each token in its row: its position id.
        nodes: parents before children, siblings in packed order.
        where_R: for each row, in the order given, where each of its tokens stands among the P.
    """

    ids_P: Ids
    depth_P: Ids
    nodes: tuple[Node, ...]
    where_R: tuple[Ids, ...]


def tree_of(rows: Sequence[Ids]) -> Tree:
    """Return the tree of `rows`, none of which may be empty."""
    order = sorted(range(len(rows)), key=lambda r: rows[r].tobytes())
    shared = [0, *(common(rows[a], rows[b]) for a, b in pairwise(order)), 0]
    ids: list[Ids] = []
    depths: list[Ids] = []
    where: dict[int, Ids] = {}
    packed = 0
    above: Ids = np.empty(0, dtype=np.int64)  # where the tokens of the row before this one stand
    for rank, r in enumerate(order):
        kept = shared[rank]
        fresh = rows[r][kept:]
        ids.append(fresh)
        depths.append(np.arange(kept, len(rows[r])))
        above = np.concatenate([above[:kept], np.arange(packed, packed + len(fresh))])
        where[r] = above
        packed += len(fresh)
    paths = [where[r] for r in order]
    where_R = tuple(where[r] for r in range(len(rows)))
    return Tree(np.concatenate(ids), np.concatenate(depths), _nodes(paths, shared), where_R)


def common(one: Ids, other: Ids) -> int:
    """Length of what both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _nodes(paths: Sequence[Ids], shared: Sequence[int]) -> tuple[Node, ...]:
    """Cut the packed tokens where rows fork.

    Args:
        paths: where the tokens of each row stand, rows in packed order.
        shared: what each row has in common with the one before it; 0 after the last.
    """
    nodes: list[Node] = []
    # A stack of half-made nodes, root first: (depth at which it begins, depth at which it ends, where it begins).
    open_: list[tuple[int, int, int]] = []
    packed = 0
    for rank, path in enumerate(paths):
        begin = shared[rank]
        if len(path) > begin:
            open_.append((begin, len(path), int(path[begin])))
            packed = int(path[-1]) + 1
        fork = shared[rank + 1]
        while open_ and open_[-1][1] > fork:
            depth, bottom, start = open_.pop()
            top = max(depth, fork)
            at = start + top - depth
            nodes.append(Node(at, start + bottom - depth, packed, top))
            if top > depth:
                open_.append((depth, top, start))
    return tuple(sorted(nodes, key=lambda node: (node.start, -node.end)))
