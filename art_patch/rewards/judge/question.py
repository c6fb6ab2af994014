"""The judge's question about a group, attempts as lines of JSON, and the verdicts that are read from its answer. Pure.

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

**Reading the answer** (`parse_verdict`) is strict, because a misread answer teaches the wrong behaviour: every id must
occur exactly once and no other id, a score must be a finite number from 0 to 1 (no string, boolean or NaN), and no key
may occur twice. Around the JSON only a Markdown code fence is accepted. An error message is one plain sentence, because
the judge reads it before its second try.
"""

import hashlib
import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any, Literal, cast

from art_patch.trajectories import main_call, number_tool_calls, offered_tools, transcript
from art_patch.types import JSON, Group

Order = Literal["shuffled", "reversed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One distinct transcript of a group, and the trajectories that have it."""

    lines: tuple[str, ...]  # one line of JSON for each message
    members: tuple[str, ...]  # ids of the trajectories with this transcript


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's score for one sibling, a finite number from 0 to 1, and the judge's reason for it."""

    score: float
    explanation: str


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


# --- the answer ---

# The same for every group, without ids and range: servers compile and cache a schema, and some refuse `maximum`.
VERDICT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "scores": {
            "type": "array",
            "items": {
                "type": "object",
                # The explanation stands before the score so that the judge has reasoned when it picks the number.
                "properties": {
                    "trajectory_id": {"type": "string"},
                    "explanation": {"type": "string"},
                    "score": {"type": "number"},
                },
                "required": ["trajectory_id", "explanation", "score"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["scores"],
    "additionalProperties": False,
}

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\r?\n(.*)\n[ \t]*```\s*", re.DOTALL | re.IGNORECASE)
_ROW_KEYS = frozenset(("trajectory_id", "explanation", "score"))
_SHOWN = 60


class VerdictError(ValueError):
    """Raised if the judge's answer is not valid; the message is one sentence that says what is wrong."""


def parse_verdict(text: str, ids: Collection[str]) -> dict[str, Verdict]:
    """Return id -> verdict for the prompt's `ids`; `VerdictError` unless the text has exactly one valid for each."""
    verdicts: dict[str, Verdict] = {}
    for row in _rows(text):
        name, verdict = _read_row(row)
        if name not in ids:
            raise VerdictError(f"there is no trajectory_id {shown(name)}; use only {', '.join(ids)}.")
        if name in verdicts:
            raise VerdictError(f"trajectory_id {name!r} is scored more than once; score each exactly once.")
        verdicts[name] = verdict
    missing = [name for name in ids if name not in verdicts]
    if missing:
        raise VerdictError(f"these trajectory_ids have no score: {', '.join(missing)}; score each exactly once.")
    return verdicts


def _rows(text: str) -> list[Any]:
    fenced = _FENCED.fullmatch(text)
    bare = fenced[1] if fenced else text
    try:
        answer: Any = json.loads(bare, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except VerdictError:
        raise
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply, or a number is too long"
        raise VerdictError(f"the answer is not a JSON object and nothing else ({why}).") from None
    if not isinstance(answer, dict) or list(cast("dict[str, Any]", answer)) != ["scores"]:
        raise VerdictError('the answer must be a JSON object with the single key "scores".')
    rows: Any = answer["scores"]
    if not isinstance(rows, list):
        raise VerdictError('"scores" must be a list.')
    return cast("list[Any]", rows)


def _read_row(row: Any) -> tuple[str, Verdict]:
    if not isinstance(row, dict) or cast("dict[str, Any]", row).keys() != _ROW_KEYS:
        raise VerdictError('each entry of "scores" must have exactly the keys "trajectory_id", "explanation", "score".')
    given = cast("dict[str, Any]", row)
    name, explanation, score = given["trajectory_id"], given["explanation"], given["score"]
    if not isinstance(name, str) or not isinstance(explanation, str):
        raise VerdictError('"trajectory_id" and "explanation" must be strings.')
    # A boolean is an int to Python; "not (a <= b <= c)" is also true of NaN.
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise VerdictError(f'the "score" of {shown(name)} must be a number from 0 to 1, not {shown(score)}.')
    # JSON can spell half a surrogate pair, which no database takes.
    return name, Verdict(float(score), explanation.encode("utf-8", "replace").decode())


def _refuse_constant(name: str) -> None:
    raise VerdictError(f"{name} is not a number that JSON or this scale knows; scores go from 0 to 1.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise VerdictError("a JSON object in the answer has the same key twice.")
    return found


def shown(value: Any) -> str:
    """Return a value of JSON for an error message, in ASCII and at most 60 characters long."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits has no decimal form, by Python's limit
        text = f"that {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
