"""Packs the rows of trajectories for a forward pass, so that a beginning that rows have in common is computed once.

A row is one token sequence of a trajectory. A pack holds the tokens of one forward pass and tells which of them are
scored. The rows of a pack form a tree: siblings have their prompt in common, and the rows of a forked conversation have
all tokens before the fork in common. A causal model computes the same hidden state for a token wherever the tokens
before it are the same. So each distinct token is computed once, and all rows that contain it use the result. This holds
within a trajectory and across groups.

The tree is a radix trie over token ids: a node is a run of tokens in which no row forks. The tokens are stored depth
first, so the tokens of all nodes below a node follow it without a gap. Therefore attention needs no mask over the tree,
but only two rectangles of scores for each node. TRL's AsyncGRPO builds the same trie
(`experimental/async_grpo/packing.py`), but its attention needs FlashAttention 3. This module needs no torch.

The suffix of a name gives the axes of an array: T tokens of one row; R rows, E examples and P distinct tokens of a
pack; N sampled tokens, predicted from Q places (positions).
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
    """A node of the tree of rows: a run of packed tokens in which no row forks.

    Positions are indices into the pack's list of distinct tokens.
    """

    start: int  # position of the node's first token
    stop: int  # one past the position of the node's last token
    end: int  # one past the position of the last token in the nodes below it; equals `stop` if there are none
    depth: int  # number of tokens in the nodes above it, which is the index of its first token in a row


@dataclass(frozen=True, slots=True)
class Tree:
    """The P distinct tokens of R rows, arranged as a tree."""

    ids_P: Ids  # token id of each distinct token
    depth_P: Ids  # index of each token in its row, which the model gets as position id
    nodes: tuple[Node, ...]  # nodes of the tree in the order of their tokens, parents before children
    # For each row, in the order given to `tree_of`, the index of each of its tokens among the P.
    where_R: tuple[Ids, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A trajectory as the trainer computes it: its rows and its advantage."""

    # Token sequences of the trajectory, each with at least one sampled token. Every sampled token is in exactly one of
    # them.
    rows: tuple[Row, ...]
    advantage: float = 0.0  # the trajectory's reward relative to the mean of its group, perhaps divided by a spread

    @property
    def sampled(self) -> int:
        """Number of sampled tokens in all rows (token sequences) of the trajectory; these tokens are learned."""
        return sum(row.sampled for row in self.rows)


@dataclass(frozen=True, slots=True)
class Pack:
    """The input of one forward pass: the P distinct tokens of E examples, and N sampled tokens predicted at Q places.

    A place is a distinct token together with a temperature. At it the logits of the next token are computed.
    """

    tree: Tree  # the distinct tokens that go through the model
    # Index among the P of the token at each place. A token stands here once for each temperature.
    at_Q: Ids
    temperature_Q: Floats  # temperature by which the logits at each place are divided
    # Index among the Q of the place from which each sampled token is predicted. Sampled tokens after the same beginning
    # share a place.
    place_N: Ids
    target_N: Ids  # token id of each sampled token
    recorded_N: Floats  # recorded log-probability of each sampled token
    example_N: Ids  # index among the E of the example that each sampled token belongs to
    advantage_E: NDArray[np.float64]  # advantage of each example
    examples_E: Ids  # index of each example in the sequence given to `packs_of`

    @property
    def tokens(self) -> int:
        """Number of distinct tokens, which is the number that goes through the model in a forward pass."""
        return len(self.tree.ids_P)


def packs_of(examples: Sequence[Example], max_tokens: int) -> list[Pack]:
    """Distributes the examples over packs; each example is in exactly one pack, and their order is kept.

    Args:
        examples: The trajectories to compute. Siblings should be neighbours, because they have the longest common
            beginnings, and a common beginning is computed once only within a pack.
        max_tokens: Largest number of distinct tokens in a pack. An example with more tokens becomes a pack by itself.
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
    """Builds the tree of `rows` (token sequences), which stores common beginnings once; no row may be empty."""
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
    """Returns the length of the longest common beginning of two token sequences."""
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
