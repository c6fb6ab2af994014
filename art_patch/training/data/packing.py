"""Packs the rows of trajectories for a forward pass, so that a beginning that rows have in common is computed once.

A row is one token sequence of a trajectory. A pack holds the tokens of one forward pass and tells which of them are
scored. The rows of a pack form a tree: siblings have their prompt in common, and the rows of a forked conversation have
all tokens before the fork in common. A causal model computes the same hidden state for a token wherever the tokens
before it are the same. So each distinct token is computed once for all rows that contain it, across groups too.

The tree is a radix trie over token ids: a node is a run of tokens in which no row forks. The tokens are stored depth
first, so the tokens of all nodes below a node follow it without a gap. Therefore attention needs no mask over the tree,
but only two rectangles of scores for each node. TRL's AsyncGRPO builds the same trie
(`experimental/async_grpo/packing.py`), but its attention needs FlashAttention 3. This module needs no torch.

The suffix of a name gives the axes of an array: T tokens of one row; R rows, E examples and P distinct tokens of a
pack; N sampled tokens, predicted from Q places (positions).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from art_patch.training.data.rows import Example, Row

Ids = np.typing.NDArray[np.int64]
Floats = np.typing.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree of rows: a run of packed tokens in which no row forks. Positions are among the P tokens."""

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
    where_R: tuple[Ids, ...]  # for each row, as given to `tree_of`, the index of each of its tokens among the P


@dataclass(frozen=True, slots=True)
class Pack:
    """The input of one forward pass: the P distinct tokens of E examples, and N sampled tokens predicted at Q places.

    A place is a distinct token together with a temperature. At it the logits of the next token are computed.
    """

    tree: Tree  # the distinct tokens that go through the model
    at_Q: Ids  # index among the P of the token at each place; a token stands here once for each temperature
    temperature_Q: Floats  # temperature by which the logits at each place are divided
    place_N: Ids  # index among the Q from which each sampled token is predicted; equal beginnings share a place
    target_N: Ids  # token id of each sampled token
    recorded_N: Floats  # recorded log-probability of each sampled token
    example_N: Ids  # index among the E of the example that each sampled token belongs to
    advantage_N: np.typing.NDArray[np.float64]  # advantage of each sampled token
    examples_E: Ids  # index of each example in the sequence given to `packs_of`
    teacher_N: Floats | None = None  # log-probability of each sampled token under the teacher, if there is one

    @property
    def tokens(self) -> int:
        """Number of distinct tokens, which is the number that goes through the model in a forward pass."""
        return len(self.tree.ids_P)


def packs_of(examples: Sequence[Example], max_tokens: int) -> list[Pack]:
    """Distributes the examples over packs; each example is in exactly one pack, and their order is kept.

    Siblings should be neighbours: they have the longest common beginnings, and a common beginning is computed once only
    within a pack. A pack has at most `max_tokens` distinct tokens; an example with more becomes a pack by itself.
    """
    return [_pack([examples[e] for e in batch], batch) for batch in _batches(examples, max_tokens)]


def _batches(examples: Sequence[Example], max_tokens: int) -> Iterator[list[int]]:
    # Whole examples only: sequence-level ratios need all tokens of a trajectory in one pack.
    batch: list[int] = []
    known: list[tuple[bytes, int]] = []  # the rows of the batch, sorted
    tokens = 0
    for index, example in enumerate(examples):
        rows = [_inputs(row) for row in example.rows]
        tokens += _add(rows, grown := known.copy())
        if batch and tokens > max_tokens:
            yield batch
            batch, grown = [], []
            tokens = _add(rows, grown)
        batch.append(index)
        known = grown
    if batch:
        yield batch


def _add(rows: Sequence[Ids], known: list[tuple[bytes, int]]) -> int:
    """Adds rows to sorted `known` ones, and returns how many distinct tokens they add, without building a tree."""
    tokens = 0
    for row in rows:
        # The longest common beginning with any row is that with one of the two neighbours in a sorted list.
        entry = (row.tobytes(), len(row))
        at = bisect_left(known, entry)
        shared = [common(row, np.frombuffer(other, dtype=np.int64)) for other, _ in known[max(0, at - 1) : at + 1]]
        known.insert(at, entry)
        tokens += len(row) - max(shared, default=0)
    return tokens


def _inputs(row: Row) -> Ids:
    # Up to the last sampled token, without it: only its prediction counts, and nothing after it is scored.
    last = max(t for t, sampled in enumerate(row.sampled_T) if sampled)
    return np.array(row.ids_T[:last], dtype=np.int64)


def _pack(examples: Sequence[Example], order: Sequence[int]) -> Pack:
    tree = tree_of([_inputs(row) for example in examples for row in example.rows])
    owned = [(index, row) for index, example in enumerate(examples) for row in example.rows]
    places = [np.flatnonzero(np.array(row.sampled_T)) for _, row in owned]

    def of_sampled(name: str, dtype: Any) -> Any:
        columns = (np.array(getattr(row, name), dtype=dtype) for _, row in owned)
        return np.concatenate([column[there] for column, there in zip(columns, places, strict=True)])

    # A token is predicted from the one before it.
    at_N = np.concatenate([where_T[there - 1] for where_T, there in zip(tree.where_R, places, strict=True)])
    # Siblings that begin alike are predicted from the same position, at the same temperature: its logits are computed
    # once. fp64 holds both positions and fp32 temperatures exactly.
    both = np.stack([at_N.astype(np.float64), of_sampled("temperature_T", np.float32)])
    distinct, place_N = np.unique(both, axis=1, return_inverse=True)
    return Pack(
        tree=tree,
        at_Q=distinct[0].astype(np.int64),
        temperature_Q=distinct[1].astype(np.float32),
        place_N=place_N.reshape(-1),
        target_N=of_sampled("ids_T", np.int64),
        recorded_N=of_sampled("logprobs_T", np.float32),
        example_N=np.repeat([index for index, _ in owned], [len(there) for there in places]),
        advantage_N=np.concatenate(
            [np.array(each.token_advantages or (each.advantage,) * each.sampled, dtype=np.float64) for each in examples]
        ),
        examples_E=np.array(order, dtype=np.int64),
        teacher_N=of_sampled("teacher_T", np.float32) if all(row.teacher_T for _, row in owned) else None,
    )


def tree_of(rows: Sequence[Ids]) -> Tree:
    """Builds the tree of `rows` (token sequences), which stores common beginnings once; no row may be empty."""
    # Sorted by their bytes, rows with a common beginning stand together; any order would do.
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
    nodes = _nodes([where[r] for r in order], shared)
    return Tree(np.concatenate(ids), np.concatenate(depths), nodes, tuple(where[r] for r in range(len(rows))))


def common(one: Ids, other: Ids) -> int:
    """Returns the length of the longest common beginning of two token sequences."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def _nodes(paths: Sequence[Ids], shared: Sequence[int]) -> tuple[Node, ...]:
    """Cuts the packed tokens where rows fork.

    `paths` are the positions of each row's tokens, rows in packed order. `shared` is the number of tokens that each row
    has in common with the row before it, and 0 after the last row.
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
