"""A transcript that is too long for the judge -> one that fits, with visible notes where something is missing. Pure.

The rule, for a transcript that may have `max_chars` characters:

1. The longest messages have their long texts cut in the middle: the beginning and the end stay, and `[... N characters
   left out ...]` says what is missing. None is cut to less than a quarter of what the transcript may have.
2. If that is not enough, messages are kept from both ends in turn, the last message first, and one message with the
   role `left out` stands for the rest and says how much it was.

So the task, the beginning of the work and the outcome are always shown, and nothing is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from art_patch.rewards.judge.question import to_line

_LONGEST_MESSAGE = (0.95, 0.8, 0.6, 0.4, 0.25)
"""Shares of the transcript's room that one message may take, tried in this order."""
_LONGEST_NOTE = 120
_SHORTEST_TEXT = 32


def shorten(lines: Sequence[str], max_chars: int) -> tuple[str, ...]:
    """Return the transcript by the rule above; untouched if it fits.

    Args:
        lines: one line of JSON a message.
        max_chars: of all lines together; with less than about 500 the two ends alone may be longer.
    """
    if sum(map(len, lines)) <= max_chars:
        return tuple(lines)
    cut: list[str] = []
    for share in _LONGEST_MESSAGE:
        cut = [_cut_line(line, int(max_chars * share)) for line in lines]
        if sum(map(len, cut)) <= max_chars:
            return tuple(cut)
    head, tail, left = 0, len(cut), max_chars - _LONGEST_NOTE
    while head < tail:
        from_tail = len(cut) - tail <= head
        line = cut[tail - 1] if from_tail else cut[head]
        if left < len(line) and head:  # by then both ends have a message
            break
        left -= len(line)
        head, tail = (head, tail - 1) if from_tail else (head + 1, tail)
    left_out = [_note(lines[head:tail])] if head < tail else []
    return (*cut[:head], *left_out, *cut[tail:])


def _cut_line(line: str, limit: int) -> str:
    """The message with its long texts cut until the line is no longer than `limit`; a note if there is no such cut."""
    if len(line) <= limit:
        return line
    message, keep = json.loads(line), limit
    while keep >= _SHORTEST_TEXT:
        shown = to_line(_cut_texts(message, keep))
        if len(shown) <= limit:
            return shown
        keep = keep * 3 // 4
    return _note([line])


def _cut_texts(value: Any, keep: int) -> Any:
    if isinstance(value, str):
        half = keep // 2
        cut = f"{value[:half]} [... {len(value) - 2 * half:,} characters left out ...] {value[-half:]}"
        return cut if len(cut) < len(value) else value
    if isinstance(value, list):
        return [_cut_texts(item, keep) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _cut_texts(item, keep) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _note(lines: Sequence[str]) -> str:
    return to_line({"role": "left out", "content": f"{len(lines):,} messages, {sum(map(len, lines)):,} characters"})
