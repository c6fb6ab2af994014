"""What the judge is asked about, before it is put into words: a group in, its distinct attempts as lines out. Pure.

- Siblings whose transcripts are the same to the judge's eye are one attempt, hence get one score.
- Nothing but messages and tools gets in: no policy name, log-probability, user, tag, key or score.
- The order is shuffled by the group's id, so that a second pass can take exactly the reverse of the first: what a judge
  gives for standing early or late then shows as a difference between the two.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from art_patch.trajectories import main_call, number_tool_calls, offered_tools, transcript
from art_patch.types import JSON, Group

Order = Literal["shuffled", "reversed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way in which the task was attempted.

    Attributes:
        lines: the transcript, one line of JSON a message.
        members: ids of the trajectories that went this way: one, or several with the same transcript.
    """

    lines: tuple[str, ...]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """All that the judge gets to see of one group, as lines of JSON.

    Attributes:
        attempts: in the order they are shown.
        tools: the tools that were offered.
        followed: what really came after the turn that the attempts answer; empty where they are whole runs.
    """

    attempts: tuple[Attempt, ...]
    tools: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()

    def of(self, attempts: Iterable[Attempt]) -> Question:
        """Return the same question about other attempts."""
        return replace(self, attempts=tuple(attempts))

    def turned(self, order: Order) -> Question:
        """Return the question with its attempts as they are for `shuffled`, the other way round for `reversed`."""
        return self if order == "shuffled" else self.of(reversed(self.attempts))


def make_question(group: Group) -> Question:
    """Return what is to be judged, its attempts shuffled."""
    members: dict[tuple[str, ...], list[str]] = {}
    for trajectory in group.trajectories:
        members.setdefault(_lines(number_tool_calls(transcript(trajectory))), []).append(trajectory.id)
    attempts = [Attempt(lines, tuple(ids)) for lines, ids in members.items()]
    rng_of(group, "order").shuffle(attempts)
    return Question(
        attempts=tuple(attempts),
        tools=tuple(to_line(tool) for tool in offered_tools(group.trajectories)),
        followed=_followed(group),
    )


def rng_of(group: Group, purpose: str) -> random.Random:
    """Return a source of chance that is the same for every pass over this group, and another for each purpose."""
    return random.Random(hashlib.sha256(f"{purpose}\0{group.id}".encode("utf-8", "surrogatepass")).digest())


def to_line(value: JSON) -> str:
    """One line of JSON that keeps readable text readable and makes every other character visible."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    # Outside its strings JSON is printable ASCII, so what is escaped here stands inside a string, where it may.
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _followed(group: Group) -> tuple[str, ...]:
    """What followed, its tool calls numbered on from the prompt, so that a result names the call that each answer made.

    A tool's result refers to the call by the id that the recorded answer gave it; the siblings gave theirs other ids.
    """
    call = main_call(group.trajectories[0]) if group.followed and group.trajectories else None
    prompt = call.messages if call is not None else ()
    return _lines(number_tool_calls((*prompt, *group.followed))[len(prompt) :])


def _lines(messages: Iterable[JSON]) -> tuple[str, ...]:
    return tuple(to_line(_tidy(message)) for message in messages)


def _tidy(message: JSON) -> JSON:
    """The message, role first, without the empty values that clients add or leave out as they please."""
    absent: tuple[Any, ...] = (None, "", [], ())
    kept = {key: message[key] for key in sorted(message) if message[key] not in absent}
    if "tool_calls" not in kept:
        kept.setdefault("content", "")  # an empty answer is something to judge
    return {"role": kept.pop("role", ""), **kept}


def _escaped(character: str) -> str:
    """The JSON escape of one character, as a surrogate pair beyond the basic plane."""
    return json.dumps(character)[1:-1] if character != "\x7f" else "\\u007f"
