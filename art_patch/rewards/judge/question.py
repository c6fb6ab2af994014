"""Makes the judge's question about a group: distinct attempts as lines of JSON, cut or split if too long. Pure.

- Siblings with the same transcript are one attempt, so they get the same score.
- The judge sees messages and tools only: no policy name, log-probability, user, tag, key or score.
- Attempts are shuffled by a generator that is seeded with the group's id. A second pass can therefore show exactly the
  reverse order, and the difference between the scores of both passes measures position bias.

**Truncation** (`shorten`) cuts a transcript to `max_chars` characters, and a note marks every cut:

1. Long texts in the longest messages are cut in the middle; a note says how many characters are missing. No message is
   cut to less than a quarter of `max_chars`.
2. If that is not enough, whole messages are left out of the middle: messages are kept from both ends in turn, the last
   one first, and one message with the role `left out` stands for the others. So the task, the beginning and the outcome
   are always shown.

**Splitting** (`split`, `merge`): a group is split into parts if its prompt is too long, or if it has more attempts than
the judge ranks well. Every part shows the same two randomly chosen attempts, the anchors. A judge uses its scale afresh
in each part, so the scores of each part are mapped to the scale of the first part, by linear interpolation through (0,
0), the two anchors and (1, 1). The map keeps the order within a part and stays in 0..1. If a part's anchors are tied,
or in another order than in the first part, the scores of that part stay as they are.
"""

import hashlib
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any, Literal, cast

from art_patch.rewards.judge.verdict import Verdict
from art_patch.trajectories import main_call, number_tool_calls, offered_tools, transcript
from art_patch.types import JSON, Group

Order = Literal["shuffled", "reversed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One distinct transcript of a group, and the trajectories that have it."""

    lines: tuple[str, ...]  # one line of JSON for each message
    members: tuple[str, ...]  # ids of the trajectories with this transcript


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the judge about one group: everything that the judge sees of it, as lines of JSON."""

    attempts: tuple[Attempt, ...]  # in the order in which they are shown
    tools: tuple[str, ...] = ()
    # Messages that followed the judged turn in the recorded run; empty where the attempts are whole runs.
    followed: tuple[str, ...] = ()

    def of(self, attempts: Iterable[Attempt]) -> "Question":
        """Return a question about the same group that shows these attempts instead of its own."""
        return replace(self, attempts=tuple(attempts))

    def turned(self, order: Order) -> "Question":
        """Return this question with its attempts in the given order."""
        return self if order == "shuffled" else self.of(reversed(self.attempts))


def make_question(group: Group) -> Question:
    """Return the question about a group: its distinct transcripts as attempts, shuffled, and its tools."""
    members: dict[tuple[str, ...], list[str]] = {}
    for trajectory in group.trajectories:
        members.setdefault(_lines(number_tool_calls(transcript(trajectory))), []).append(trajectory.id)
    attempts = [Attempt(lines, tuple(ids)) for lines, ids in members.items()]
    rng_of(group, "order").shuffle(attempts)
    return Question(tuple(attempts), tuple(map(to_line, offered_tools(group.trajectories))), _followed(group))


def rng_of(group: Group, purpose: str) -> random.Random:
    """Return a random generator seeded by the group's id and `purpose`, so every pass draws the same numbers."""
    return random.Random(hashlib.sha256(f"{purpose}\0{group.id}".encode("utf-8", "surrogatepass")).digest())


def to_line(value: JSON) -> str:
    """Return a value as one line of JSON. Printable text stays readable; every other character is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    # Outside its strings JSON is printable ASCII, so what is escaped here stands inside a string, where it may.
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _followed(group: Group) -> tuple[str, ...]:
    """Return what followed the judged turn, with its tool calls numbered like those of the attempts."""
    # A tool's result names its call by the id in the recorded answer, but each sibling's call has another id. Numbering
    # on from the prompt gives the n-th call the same name in every attempt and in what followed.
    call = main_call(group.trajectories[0]) if group.followed and group.trajectories else None
    prompt = call.messages if call is not None else ()
    return _lines(number_tool_calls((*prompt, *group.followed))[len(prompt) :])


def _lines(messages: Iterable[JSON]) -> tuple[str, ...]:
    return tuple(to_line(_tidy(message)) for message in messages)


def _tidy(message: JSON) -> JSON:
    """Return the message with its role first, without the empty values that some clients add and others leave out."""
    absent: tuple[Any, ...] = (None, "", [], ())
    kept = {key: message[key] for key in sorted(message) if message[key] not in absent}
    if "tool_calls" not in kept:
        kept.setdefault("content", "")  # an empty answer is something to judge
    return {"role": kept.pop("role", ""), **kept}


def _escaped(character: str) -> str:
    """Return the JSON escape of one character; beyond the basic plane a surrogate pair."""
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"


# --- too long: truncation ---

# Shares of the transcript's room that one message may take, tried in this order.
_LONGEST_MESSAGE = (0.95, 0.8, 0.6, 0.4, 0.25)
_LONGEST_NOTE = 120
_SHORTEST_TEXT = 32


def shorten(lines: Sequence[str], max_chars: int) -> tuple[str, ...]:
    """Return a transcript's lines, cut with notes to `max_chars`, but never below its first and last message."""
    if sum(map(len, lines)) <= max_chars:
        return tuple(lines)
    cut = list(lines)
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
    """Return the message with its long texts cut, or a note in its place, no longer than `limit`."""
    shown, keep = line, limit
    while len(shown) > limit:
        if keep < _SHORTEST_TEXT:
            return _note([line])
        shown, keep = to_line(_cut_texts(json.loads(line), keep)), keep * 3 // 4
    return shown


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


# --- too large: parts with anchors ---


ANCHORS = 2

# Shares of its room that an attempt is shortened to, until the parts fit. Several, because the number of tokens for a
# character differs from text to text.
_TIGHTER = (0.95, 0.8, 0.6, 0.4)


class TooLongError(ValueError):
    """Raised by `split` if rubric and tools leave no room for attempts in the judge's context; the message says why."""


def split(
    question: Question, size: Callable[[Question], int], *, max_tokens: int, max_siblings: int, rng: Random
) -> tuple[Question, ...]:
    """Return the question itself if it fits, else parts of it that together ask about every attempt.

    `size` counts the tokens of a question's prompt; `max_siblings` is at least 3; `rng` chooses the two anchors. Raises
    a `TooLongError` if rubric and tools leave no room for the attempts.
    """
    anchors = set(rng.sample(sorted(a.members for a in question.attempts), min(ANCHORS, len(question.attempts))))

    def fits(part: Question) -> bool:
        return size(part) <= max_tokens

    if parts := _pack(question, anchors, fits, max_siblings):
        return parts
    frame = size(question.of(()))
    room = (max_tokens - frame) // max(min(len(question.attempts), ANCHORS + 1), 1)
    tokens = size(question) - frame
    chars = sum(len(line) for attempt in question.attempts for line in attempt.lines)
    for share in _TIGHTER if room > 0 else ():
        max_chars = int(room * share * chars / max(tokens, 1))
        shorter = question.of(replace(a, lines=shorten(a.lines, max_chars)) for a in question.attempts)
        if parts := _pack(shorter, anchors, fits, max_siblings):
            return parts
    raise TooLongError(
        f"rubric and tools alone take {frame} of the {max_tokens} tokens that the judge may be sent, which leaves no "
        "room for the attempts; name a judge that reads more, or raise max_prompt_tokens"
    )


def merge(parts: Sequence[Mapping[str, Verdict]]) -> dict[str, Verdict]:
    """Return one verdict for each trajectory id; scores of later parts are mapped to the scale of the first part."""
    first, *others = parts
    merged = dict(first)
    for part in others:
        to_first = _scale([(part[key].score, first[key].score) for key in part if key in first])
        new = part.keys() - first.keys()
        merged |= {key: replace(verdict, score=to_first(verdict.score)) for key, verdict in part.items() if key in new}
    return merged


def _pack(
    question: Question, anchors: set[tuple[str, ...]], fits: Callable[[Question], bool], max_siblings: int
) -> tuple[Question, ...]:
    """Return the question if it fits, else a few parts of similar size; empty if an attempt fits into no part."""
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
    """Return the map through these (own score, score in the first part) pairs; the identity if they do not rise."""
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
