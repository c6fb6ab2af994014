"""What is learned from and what is asked in the examination: made-up inboxes, or one's own inbox with its questions.

Of one's own questions one in five is held out, by a hash of its text.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import questions
import stand_in
from inbox import Inbox
from questions import Asked
from synthetic import make

from art_patch.demo.example_script import shared_options

_EMAILS = 500
_EXAMINATIONS, _QUESTIONS = 4, 24


@dataclass(frozen=True)
class Synthetic:
    """A new inbox for each lesson, and some for the examination, about pairs that no lesson knows.

    Attributes:
        emails: in each inbox.
    """

    emails: int

    def held_out(self) -> list[Asked]:
        """The questions of the examination."""
        worlds = [make(f"examination {n}", self.emails, examination=True) for n in range(_EXAMINATIONS)]
        return [asked for world in worlds for asked in world.questions(_QUESTIONS, "examination")]

    def lesson(self, count: int, seed: str) -> list[Asked]:
        """Questions to learn from, drawn anew for each seed."""
        return make(f"lesson {seed}", self.emails).questions(count, seed)


@dataclass(frozen=True)
class Own:
    """A file with an inbox, and one with questions about it."""

    inbox: Path
    questions: Path

    def held_out(self) -> list[Asked]:
        """The questions of the examination."""
        return [asked for asked in self._all() if _is_held_out(asked.question.text)]

    def lesson(self, count: int, seed: str) -> list[Asked]:
        """Questions to learn from, drawn anew for each seed; all of them if there are no more."""
        known = [asked for asked in self._all() if not _is_held_out(asked.question.text)]
        return random.Random(seed).sample(known, min(count, len(known)))

    def _all(self) -> list[Asked]:
        inbox = Inbox.existing(self.inbox)
        return [Asked(inbox, question) for question in questions.read(self.questions)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that training and evaluation share."""
    shared_options(parser)
    parser.add_argument("--inbox", type=Path, help="one's own; made-up ones unless given")
    parser.add_argument("--questions", type=Path, help="JSON lines about that inbox")


def chosen(asked: argparse.Namespace) -> Synthetic | Own:
    """What the options name."""
    if (asked.inbox is None) != (asked.questions is None):
        raise SystemExit("--inbox and --questions belong together: give both, or neither")
    if asked.inbox is not None:
        return Own(asked.inbox, asked.questions)
    return Synthetic(_EMAILS if asked.base_model else stand_in.EMAILS)


def _is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % 5 == 0
