"""Trajectories to packs: the tokens of one forward pass, and which of them are scored. Pure, no torch.

A pack is the tree of all its rows. Siblings share a prompt, and the turns of a forked conversation share all that came
before the fork. A causal model computes the same for a token wherever the tokens before it are the same. So each such
token is computed once, within a trajectory and across groups, and every row below it reads it.

The tree is a radix trie over token ids: a node is a run of tokens without a fork. Tokens are laid out depth first, so
the tokens below a node follow it without a gap. Attention therefore needs no mask over the tree, only two rectangles
for each node. TRL's AsyncGRPO keys its trie the same way (`experimental/async_grpo/packing.py`); its attention needs
FlashAttention 3.

Names of axes: T tokens of one row; R rows, E examples and P distinct tokens of a pack; N sampled tokens, predicted from
Q places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from art_patch.training.data.rows import Row

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens in which no row forks; numbers are positions in the packed order.

    Attributes:
        start: Position of its first token.
        stop: One past the position of its last token.
        end: One past the position of the last token below it.
        depth: Number of tokens above it.
    """

    start: int
    stop: int
    end: int
    depth: int


@dataclass(frozen=True, slots=True)
class Tree:
    """The P distinct tokens of R rows.

    Attributes:
        ids_P: Id of each token.
        depth_P: Place of each token in its row, which is its position id.
        nodes: Parents before children, siblings in packed order.
        where_R: For each row, in the order given, the position of each of its tokens among the P.
    """

    ids_P: Ids
    depth_P: Ids
    nodes: tuple[Node, ...]
    where_R: tuple[Ids, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A trajectory to learn from.

    Attributes:
        rows: Its rows, each with at least one sampled token. Every sampled token is in exactly one of them.
        advantage: How much better it did than its group.
    """

    rows: tuple[Row, ...]
    advantage: float = 0.0

    @property
    def sampled(self) -> int:
        """Number of tokens that are learned."""
        return sum(row.sampled for row in self.rows)


@dataclass(frozen=True, slots=True)
class Pack:
    """The P distinct tokens of the rows of E examples, and the N sampled tokens predicted from Q places.

    Attributes:
        tree: The tokens that are computed.
        at_Q: Position among the P from which something is predicted; one entry for each temperature.
        temperature_Q: Divides the logits there.
        place_N: Index among the Q from which each sampled token is predicted. Siblings that begin alike share places.
        target_N: Id of the sampled token.
        recorded_N: Log-probability of the sampled token, as it was recorded.
        example_N: Index among the E of the example that it belongs to.
        advantage_E: Advantage of each example.
        examples_E: Index of each example in the order given to `packs_of`.
    """

    tree: Tree
    at_Q: Ids
    temperature_Q: Floats
    place_N: Ids
    target_N: Ids
    recorded_N: Floats
    example_N: Ids
    advantage_E: NDArray[np.float64]
    examples_E: Ids

    @property
    def tokens(self) -> int:
        """Number of tokens that are computed."""
        return len(self.tree.ids_P)


def packs_of(examples: Sequence[Example], max_tokens: int) -> list[Pack]:
    """Returns packs that together hold each example once, in order.

    Args:
        examples: The examples; siblings should stand together, because they share most.
        max_tokens: Number of distinct tokens that a pack may compute. An example that has more is a pack of its own.
    """
    return [_pack([examples[e] for e in batch], batch) for batch in _batches(examples, max_tokens)]


def _batches(examples: Sequence[Example], max_tokens: int) -> Iterator[list[int]]:
    # Whole examples only: sequence-level ratios need all tokens of a trajectory in one pack.
    batch: list[int] = []
    size = _Size()
    for index, example in enumerate(examples):
        rows = [_inputs(row) for row in example.rows]
        grown = size.with_rows(rows)
        if batch and grown.tokens > max_tokens:
            yield batch
            batch, grown = [], _Size().with_rows(rows)
        batch.append(index)
        size = grown
    if batch:
        yield batch


class _Size:
    """Counts the distinct tokens of some rows without building their tree."""

    def __init__(self, rows: Sequence[tuple[bytes, int]] = (), tokens: int = 0) -> None:
        self._rows = list(rows)
        self.tokens = tokens

    def with_rows(self, rows: Sequence[Ids]) -> _Size:
        """Returns the size with `rows` added."""
        more = _Size(self._rows, self.tokens)
        for row in rows:
            more._add(row)
        return more

    def _add(self, row: Ids) -> None:
        # Rows are kept sorted. The longest common beginning with any row is then that with one of its two neighbours.
        entry = (row.tobytes(), len(row))
        at = bisect_left(self._rows, entry)
        beside = self._rows[max(0, at - 1) : at + 1]
        known = [common(row, np.frombuffer(other, dtype=np.int64)) for other, _ in beside]
        self._rows.insert(at, entry)
        self.tokens += len(row) - max(known, default=0)


def _inputs(row: Row) -> Ids:
    # Up to the last sampled token, without it: only its prediction counts, and nothing after it is scored.
    last = max(t for t, sampled in enumerate(row.sampled_T) if sampled)
    return np.array(row.ids_T[:last], dtype=np.int64)


def _pack(examples: Sequence[Example], order: Sequence[int]) -> Pack:
    tree = tree_of([_inputs(row) for example in examples for row in example.rows])
    at: list[Ids] = []
    temperature: list[Floats] = []
    target: list[Ids] = []
    recorded: list[Floats] = []
    owner: list[Ids] = []
    where = iter(tree.where_R)
    for index, example in enumerate(examples):
        for row in example.rows:
            sampled = np.flatnonzero(np.array(row.sampled_T))
            at.append(next(where)[sampled - 1])  # a token is predicted from the one before it
            temperature.append(np.array(row.temperature_T, dtype=np.float32)[sampled])
            target.append(np.array(row.ids_T, dtype=np.int64)[sampled])
            recorded.append(np.array(row.logprobs_T, dtype=np.float32)[sampled])
            owner.append(np.full(len(sampled), index))
    # Siblings that begin alike are predicted from the same position, at the same temperature: its logits are computed
    # once. fp64 holds both positions and fp32 temperatures exactly.
    places = np.stack([np.concatenate(at).astype(np.float64), np.concatenate(temperature)])
    distinct, place_N = np.unique(places, axis=1, return_inverse=True)
    example_N = np.concatenate(owner)
    return Pack(
        tree=tree,
        at_Q=distinct[0].astype(np.int64),
        temperature_Q=distinct[1].astype(np.float32),
        place_N=place_N.reshape(-1),
        target_N=np.concatenate(target),
        recorded_N=np.concatenate(recorded),
        example_N=example_N,
        advantage_E=np.array([example.advantage for example in examples], dtype=np.float64),
        examples_E=np.array(order, dtype=np.int64),
    )


def tree_of(rows: Sequence[Ids]) -> Tree:
    """Returns the tree of `rows`, none of which may be empty."""
    # Sorted by their bytes, rows with a common beginning stand together. The order of bytes is not that of numbers, and
    # any order would do.
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
    """Returns the number of tokens that both begin with."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _nodes(paths: Sequence[Ids], shared: Sequence[int]) -> tuple[Node, ...]:
    """Cuts the packed tokens where rows fork.

    Args:
        paths: Positions of the tokens of each row, rows in packed order.
        shared: Number of tokens that each row has in common with the row before it; 0 after the last row.
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
        # Where the next row forks off, every node below the fork is done. A node that the fork is inside of is cut: its
        # lower part is done, and its upper part stays open for the next row.
        fork = shared[rank + 1]
        while open_ and open_[-1][1] > fork:
            depth, bottom, start = open_.pop()
            top = max(depth, fork)
            at = start + top - depth
            nodes.append(Node(at, start + bottom - depth, packed, top))
            if top > depth:
                open_.append((depth, top, start))
    return tuple(sorted(nodes, key=lambda node: (node.start, -node.end)))
