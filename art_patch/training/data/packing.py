"""Trajectories to packs: what one forward pass computes, and which of its tokens are scored. Pure, no torch.

A pack is the tree of all its rows, so whatever two rows begin with (a system prompt, a scenario, the turns before a
fork) is computed once, within a trajectory and across groups. A row ends before its last sampled token: nothing after
it is scored, and of that token itself only the prediction counts.

A trajectory is never divided between packs, because sequence-level ratios need all of its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from art_patch.training.data.rows import Row
from art_patch.training.data.tree import Ids, Tree, common, tree_of

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Example:
    """A trajectory as it is learned from.

    Attributes:
        rows: each with at least one sampled token; what was sampled is in one of them.
        advantage: how much better it did than its group.
    """

    rows: tuple[Row, ...]
    advantage: float = 0.0

    @property
    def sampled(self) -> int:
        """Number of tokens that are learned."""
        return sum(row.sampled for row in self.rows)


@dataclass(frozen=True, slots=True)
class Pack:
    """P distinct tokens of the rows of E examples; N sampled tokens predicted from Q places.

    Attributes:
        tree: the tokens that are computed.
        at_Q: among the P, from where something is predicted; one entry for each temperature.
        temperature_Q: divides the logits there.
        place_N: among the Q, from where each sampled token is predicted. Siblings that begin alike share places.
        target_N: the token that was sampled.
        recorded_N: its recorded log-probability.
        example_N: among the E, whose token it is.
        advantage_E: of each example.
        tokens_E: sampled tokens of each example.
        examples_E: where each example stood in the order given.
    """

    tree: Tree
    at_Q: Ids
    temperature_Q: Floats
    place_N: Ids
    target_N: Ids
    recorded_N: Floats
    example_N: Ids
    advantage_E: NDArray[np.float64]
    tokens_E: Ids
    examples_E: Ids

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.tree.ids_P)


def packs_of(examples: Sequence[Example], max_tokens: int) -> list[Pack]:
    """Return packs that together hold each example once, in order.

    Args:
        examples: siblings should stand together.
        max_tokens: distinct tokens a pack may compute. An example that has more is a pack of its own.
    """
    return [_pack([examples[e] for e in batch], batch) for batch in _batches(examples, max_tokens)]


def _batches(examples: Sequence[Example], max_tokens: int) -> Iterator[list[int]]:
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
    """How many distinct tokens some rows have."""

    def __init__(self, rows: Sequence[tuple[bytes, int]] = (), tokens: int = 0) -> None:
        self._rows = list(rows)
        self.tokens = tokens

    def with_rows(self, rows: Sequence[Ids]) -> _Size:
        """Return the size with `rows` added."""
        more = _Size(self._rows, self.tokens)
        for row in rows:
            more._add(row)
        return more

    def _add(self, row: Ids) -> None:
        entry = (row.tobytes(), len(row))
        at = bisect_left(self._rows, entry)
        beside = self._rows[max(0, at - 1) : at + 1]
        known = [common(row, np.frombuffer(other, dtype=np.int64)) for other, _ in beside]
        self._rows.insert(at, entry)
        self.tokens += len(row) - max(known, default=0)


def _inputs(row: Row) -> Ids:
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
            at.append(next(where)[sampled - 1])
            temperature.append(np.array(row.temperature_T, dtype=np.float32)[sampled])
            target.append(np.array(row.ids_T, dtype=np.int64)[sampled])
            recorded.append(np.array(row.logprobs_T, dtype=np.float32)[sampled])
            owner.append(np.full(len(sampled), index))
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
        tokens_E=np.bincount(example_N, minlength=len(examples)),
        examples_E=np.array(order, dtype=np.int64),
    )
