"""Groups too large for one question: split into parts that share anchors, and put back on one scale. Pure.

A group is split where its prompt is longer than the judge can read, or has more attempts than it can rank well. Two
**anchors**, drawn at random, stand in every part. A judge uses its scale afresh each time, so what it gave the anchors
in each part says how that part's scale lies on the first one's: other scores go through the line of straight pieces
from (0, 0) over each anchor's pair (its score here, its score in the first part) to (1, 1). That map keeps the order
within a part and stays in 0..1. Where the anchors tell nothing (both scored alike, or in another order than in the
first part) the scores stay as they are.

If two anchors and one other attempt are already too much, attempts longer than their share of the room are shortened
by the rule of `eliding`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from art_patch.rewards.judge.question import Attempt, Question
from art_patch.rewards.judge.truncation import shorten
from art_patch.rewards.judge.verdict import Verdict

ANCHORS = 2

_TIGHTER = (0.95, 0.8, 0.6, 0.4)
"""Shares of its room that an attempt is shortened to, until the parts fit: tokens for a character differ by text."""


class TooLongError(ValueError):
    """No part of the group fits into what the judge can read. The message says why."""


def split(
    question: Question, size: Callable[[Question], int], *, max_tokens: int, max_siblings: int, rng: Random
) -> tuple[Question, ...]:
    """Return the question, or parts of it that together ask about every attempt.

    Args:
        question: about the whole group.
        size: tokens of the prompt that a question makes.
        max_tokens: what a prompt may have.
        max_siblings: how many attempts may stand in one prompt; at least 3.
        rng: draws the anchors.

    Raises:
        TooLongError: what is not the attempts' own (rubric, tools) leaves no room for them.
    """
    anchors = set(rng.sample(sorted(a.members for a in question.attempts), min(ANCHORS, len(question.attempts))))

    def fits(part: Question) -> bool:
        return size(part) <= max_tokens

    parts = _pack(question, anchors, fits, max_siblings)
    if parts:
        return parts
    frame = size(question.of(()))
    room = (max_tokens - frame) // max(min(len(question.attempts), ANCHORS + 1), 1)
    tokens = size(question) - frame
    chars = sum(len(line) for attempt in question.attempts for line in attempt.lines)
    for share in _TIGHTER if room > 0 else ():
        max_chars = int(room * share * chars / max(tokens, 1))
        shorter = question.of(replace(a, lines=shorten(a.lines, max_chars)) for a in question.attempts)
        parts = _pack(shorter, anchors, fits, max_siblings)
        if parts:
            return parts
    raise TooLongError(
        f"rubric and tools alone take {frame} of the {max_tokens} tokens that the judge may be sent, which leaves no "
        "room for the attempts; name a judge that reads more, or raise max_prompt_tokens"
    )


def merge(parts: Sequence[Mapping[str, Verdict]]) -> dict[str, Verdict]:
    """Return one verdict for each trajectory id, all on the scale of the first part."""
    first, *others = parts
    merged = dict(first)
    for part in others:
        to_first = _scale([(part[key].score, first[key].score) for key in part if key in first])
        merged |= {
            key: replace(verdict, score=to_first(verdict.score)) for key, verdict in part.items() if key not in first
        }
    return merged


def _pack(
    question: Question, anchors: set[tuple[str, ...]], fits: Callable[[Question], bool], max_siblings: int
) -> tuple[Question, ...]:
    """The question whole if it fits, else as few parts as do, of about the same size; none if some part cannot fit."""
    if len(question.attempts) <= max_siblings and fits(question):
        return (question,)
    others = [attempt for attempt in question.attempts if attempt.members not in anchors]
    least = -(-len(others) // (max_siblings - ANCHORS))
    most = -(-len(others) // least) if others else 0

    def part(some: Sequence[Attempt]) -> Question:
        return question.of(a for a in question.attempts if a.members in anchors or a in some)

    parts: list[list[Attempt]] = []
    for other in others:
        if parts and len(parts[-1]) < most and fits(part([*parts[-1], other])):
            parts[-1].append(other)
        elif fits(part([other])):
            parts.append([other])
        else:
            return ()
    return tuple(part(some) for some in parts)


def _scale(knots: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """The map that takes each knot's first number to its second; identity where no rising line goes through them."""
    line = sorted(set(knots))
    rises = all(x < x2 and y < y2 for (x, y), (x2, y2) in pairwise(line))
    if len(line) < ANCHORS or not rises or all(x == y for x, y in line):
        return lambda score: score
    if line[0][0] > 0:
        line = [(0.0, 0.0), *line]
    if line[-1][0] < 1:
        line = [*line, (1.0, 1.0)]

    def scale(score: float) -> float:
        at = min(max(bisect_right(line, (score, 2.0)), 1), len(line) - 1)
        (x, y), (x2, y2) = line[at - 1], line[at]
        return min(max(y + (y2 - y) * (score - x) / (x2 - x), 0.0), 1.0)

    return scale
