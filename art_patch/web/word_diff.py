"""Compares two conversations word by word, for two columns. Bounded: recorded texts may be of any length.

Conversations that begin alike are compared from where they part. Their messages are then paired by their position, and
the words of each pair are compared. Of a long text only the beginning is compared and shown, and the rest is counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from itertools import takewhile, zip_longest
from operator import eq
from typing import Any, Literal, cast

from art_patch.trajectories import canonical, number_tool_calls
from art_patch.types import JSON

MOST_CHARS = 6_000  # of a message
MOST_WORDS = 800  # of a message
MOST_MESSAGES = 40  # of those that differ, and of those that are shared
_FREQUENT = 12  # a word that stands more often on the right begins no shared part

Piece = tuple[Literal["same", "only"], str]

_WORD = re.compile(r"\S+\s*|\s+")


def compared(left: Sequence[JSON], right: Sequence[JSON]) -> JSON:
    """Return what two conversations share at their beginning, and their messages after it, pair by pair.

    `shared` are the last messages of the shared part, `shared_count` is the number of all. Each of `pairs` has a `left`
    and a `right`: a message's role, its `pieces` that are the `same` in both or `only` there, and the number of
    characters that were `cut`; `None` if that side has no message there. `pairs_cut` further pairs are left out.
    """
    keys = ([canonical(each) for each in number_tool_calls(side)] for side in (left, right))
    count = sum(takewhile(bool, map(eq, *keys)))
    pairs = [_pair(one, other) for one, other in zip_longest(left[count:], right[count:])][:MOST_MESSAGES]
    rest = max(len(left), len(right)) - count
    return {
        "shared": [_side(each, None) for each in left[max(0, count - MOST_MESSAGES) : count]],
        "shared_count": count,
        "pairs": pairs,
        "pairs_cut": rest - len(pairs),
    }


def pieces_of(left: str, right: str) -> tuple[list[Piece], list[Piece]]:
    """Return both texts in pieces, each the `same` in both texts or `only` in one."""
    words = [_WORD.findall(text) for text in (left, right)]
    # Words are compared without the space after them. The matcher's time grows with the pairs of equal words, and its
    # own rule for frequent ones is only for texts of 200 words and more.
    before, after = ([word.strip() for word in side] for side in words)
    counts = Counter(after)
    matcher = SequenceMatcher(lambda word: counts[word] > _FREQUENT, before, after)
    found: tuple[list[Piece], list[Piece]] = ([], [])
    for kind, begin, end, other_begin, other_end in matcher.get_opcodes():
        for side, (start, stop) in enumerate(((begin, end), (other_begin, other_end))):
            if start < stop:
                found[side].append(("same" if kind == "equal" else "only", "".join(words[side][start:stop])))
    return found


def said(message: Mapping[str, Any]) -> str:
    """Return all that a message says as one text: what was thought, the content, and its tool calls."""
    parts = [message.get("reasoning_content") or message.get("reasoning"), message.get("refusal")]
    content: Any = message.get("content")
    if isinstance(content, list):  # parts: texts and pictures
        content = "\n".join(map(_of_part, cast("list[Any]", content)))
    parts.append(content)
    for call in message.get("tool_calls") or ():
        function: Any = cast("Mapping[str, Any]", call).get("function") or {}
        arguments = function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"{function.get('name', '?')}({text})")
    return "\n".join(str(part) for part in parts if part)


def _of_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    its = cast("Mapping[str, Any]", part)
    return str(its.get("text") or f"[{its.get('type', 'part')}]")


def _pair(left: JSON | None, right: JSON | None) -> JSON:
    if left is None or right is None:
        return {"left": left and _side(left, None), "right": right and _side(right, None)}
    sides = pieces_of(_short(said(left)), _short(said(right)))
    return {"left": _side(left, sides[0]), "right": _side(right, sides[1])}


def _side(message: JSON, pieces: list[Piece] | None) -> JSON:
    text = said(message)
    short = _short(text)
    shown = [("same", short)] if pieces is None else pieces
    return {"role": str(message.get("role", "?")), "pieces": shown, "cut": len(text) - len(short)}


def _short(text: str) -> str:
    text = text[:MOST_CHARS]
    words = _WORD.findall(text)
    return "".join(words[:MOST_WORDS])
