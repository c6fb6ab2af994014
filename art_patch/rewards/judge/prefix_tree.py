"""Lists that begin alike as a prefix tree: attempts in, segments and a path of segments for each attempt out. Pure.

A segment is a run of lines in which no attempt branches off or ends, so each (everything before, line) is in exactly
one segment, however deep siblings part ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tree(NamedTuple):
    """Segments, and which of them make each attempt.

    Attributes:
        segments: runs of lines; every segment comes after the one it follows.
        paths: one for each attempt: the numbers of its segments in order; joined, they are the attempt.
    """

    segments: list[tuple[str, ...]]
    paths: list[list[int]]


def prefix_tree(attempts: Sequence[tuple[str, ...]]) -> Tree:
    """Return the tree of these attempts; branches stand in the order of the first attempt that takes them."""
    tree = Tree([], [[] for _ in attempts])
    _grow(tree, attempts, list(range(len(attempts))), 0)
    return tree


def _grow(tree: Tree, attempts: Sequence[tuple[str, ...]], alike: Sequence[int], start: int) -> None:
    """Add what comes after the first `start` lines, in which the attempts `alike` are the same."""
    branches: dict[str, list[int]] = {}
    for number in alike:
        if len(attempts[number]) > start:
            branches.setdefault(attempts[number][start], []).append(number)
    for branch in branches.values():
        first = attempts[branch[0]]
        shortest = min(len(attempts[number]) for number in branch)
        end = start + 1
        while end < shortest and all(attempts[number][end] == first[end] for number in branch):
            end += 1
        for number in branch:
            tree.paths[number].append(len(tree.segments))
        tree.segments.append(first[start:end])
        if len(branch) > 1:
            _grow(tree, attempts, branch, end)
