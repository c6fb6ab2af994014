"""Questions about an inbox, and what an answer to one is worth. Standard library only.

- A right answer says the fact, in whatever words, and none of the facts that would be wrong.
- Where the inbox does not tell, "I don't know" is the right answer. Elsewhere it is better than a wrong one.
- In a file they are JSON lines: `{"text": ..., "answer": ..., "email": 17, "wrong": [...]}`; `answer` and `email` are
  null where the inbox does not tell, `wrong` may be left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from inbox import Inbox

_UNKNOWN = re.compile(
    r"\b(do|does|can)( not|not|n't) (know|tell|say|find)\b|\bcan't (tell|say|find)\b|\bunknown\b", re.IGNORECASE
)
_USUAL_TURNS = 3
"""Search, read, answer."""


@dataclass(frozen=True)
class Question:
    """A question; `answer` and `email` (the number of the mail that tells) are `None` where the inbox does not tell."""

    text: str
    answer: str | None
    email: int | None
    wrong: tuple[str, ...] = ()

    def is_right(self, said: str) -> bool:
        """Whether an answer is right."""
        if self.answer is None:
            return says_unknown(said)
        return _has(said, self.answer) and not any(_has(said, wrong) for wrong in self.wrong)


@dataclass(frozen=True)
class Asked:
    """A question and the inbox that it is about."""

    inbox: Inbox
    question: Question


def says_unknown(said: str) -> bool:
    """Whether an answer says that the inbox does not tell."""
    return bool(_UNKNOWN.search(said.replace("\u2019", "'")))


def reward(question: Question, said: str, *, read: set[int], turns: int) -> float:
    """What a run is worth: the answer most of all, a bit for reading the mail that tells, less for many turns.

    Args:
        question: that was asked.
        said: the answer in the end; empty if there was none.
        read: numbers of the mails that were read.
        turns: answers of the model, tool calls included.
    """
    answered = 1.0 if question.is_right(said) else 0.1 if says_unknown(said) else 0.0
    return answered + 0.1 * (question.email in read) - 0.02 * max(0, turns - _USUAL_TURNS)


def write(questions: Iterable[Question], path: Path) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(asdict(question)) + "\n" for question in questions))


def read(path: Path) -> list[Question]:
    """Read JSON lines."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [Question(**row | {"wrong": tuple(row.get("wrong", ()))}) for row in rows]


def _has(said: str, fact: str) -> bool:
    words = r"\W+".join(map(re.escape, fact.split()))
    return bool(re.search(rf"(?<!\w){words}(?!\w)", said, re.IGNORECASE))
