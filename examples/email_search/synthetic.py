"""A made-up inbox and questions about it: `python synthetic.py --seed 0 --emails 500 --out inbox.db`.

Writes the inbox, and the questions beside it as `inbox.jsonl`; the same mails and questions for the same seed.
Standard library only.

- A person wants something: a day or a room to meet in about a topic, or money for it. Somebody else may mention person
  and topic and say another value; both mails are found by the same words, and only one is the answer.
- One pair of person and topic in five is held out, by a hash that no seed moves. Inboxes to learn from have no mail by
  that person about that topic; questions of the examination are about nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from inbox import Email, Inbox
from questions import Asked, Question, write

PEOPLE = (
    "Ada", "Alan", "Boris", "Carla", "Chen", "David", "Elena", "Emil", "Fatima", "Felix", "Grace", "Hugo", "Ines",
    "Ivan", "Jonas", "Kira", "Leo", "Lucy", "Maria", "Max", "Mina", "Nadia", "Oscar", "Paula", "Quinn", "Ravi",
    "Sofia", "Tom", "Vera", "Zoe",
)  # fmt: skip
TOPICS = (
    "archive", "balcony", "bakery", "bridge", "budget", "cafe", "calendar", "carpet", "contract", "dentist",
    "elevator", "fence", "festival", "garage", "garden", "harvest", "kitchen", "lawsuit", "library", "newsletter",
    "orchestra", "parade", "printer", "roof", "server", "stadium", "tunnel", "website", "window", "yacht",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ROOMS = ("Amber", "Black", "Green", "Orange", "Purple", "Silver", "White", "Yellow")
COSTS = ("100", "200", "300", "400", "500", "600", "700", "800", "900")
DATES = tuple(f"2024-03-{day:02d}" for day in range(1, 32))

ASKS = {
    "day": "Let us meet about the {topic} on {value}.",
    "room": "Let us meet about the {topic} in the {value} room.",
    "cost": "I want to spend {value} dollars on the {topic}.",
}
MENTIONS = "{person} wrote about the {topic}. I say {value}."
QUESTIONS = {
    "day": "On which day does {person} want to meet about the {topic}?",
    "room": "In which room does {person} want to meet about the {topic}?",
    "cost": "How many dollars does {person} want to spend on the {topic}?",
}
VALUES = {"day": DAYS, "room": ROOMS, "cost": COSTS}

_P_MENTIONED = 0.1
_P_MENTION_IS_NEWER = 0.5
_ABSENT = 8
"""Of so many pairs one asks for nothing: a question about it has no answer."""

Pair = tuple[str, str]
"""(person, topic)."""

Wish = tuple[str, str | None]
"""(kind, value) of what a pair wants; no value if no mail says it."""


@dataclass(frozen=True)
class World:
    """An inbox, and who asks for what in it.

    Attributes:
        inbox: of the mails.
        wishes: of the pairs that may be asked about.
        numbers: of the mails that say them.
    """

    inbox: Inbox
    wishes: dict[Pair, Wish]
    numbers: dict[Pair, int]

    def questions(self, count: int, seed: str) -> list[Asked]:
        """Questions, each about another pair."""
        rng = random.Random(f"questions {seed}")
        return [self.question(pair) for pair in rng.sample(sorted(self.wishes), count)]

    def question(self, pair: Pair) -> Asked:
        """The question about what a pair wants."""
        kind, value = self.wishes[pair]
        wrong = tuple(other for other in VALUES[kind] if other != value) if value else ()
        text = QUESTIONS[kind].format(person=pair[0], topic=pair[1])
        return Asked(self.inbox, Question(text, value, self.numbers.get(pair), wrong))


def make(seed: str, emails: int, *, path: str | Path = ":memory:", examination: bool = False) -> World:
    """Make an inbox; one for the examination is asked about held-out pairs alone, others know nothing of these.

    Raises:
        ValueError: there are not enough people and topics for so many mails.
    """
    wishes, arriving = _drawn(random.Random(f"inbox {seed}"), emails, examination)
    if len(arriving) < emails:
        raise ValueError(f"{emails} mails are too many for so few people and topics; {len(arriving)} would do")
    arriving = sorted(arriving[:emails], key=lambda each: each.time)
    inbox = Inbox(path)
    inbox.add(each.mail for each in arriving)
    numbers = {each.asks: number for number, each in enumerate(arriving, start=1) if each.asks}
    asked = {
        pair: (kind, value)
        for pair, (kind, value) in wishes.items()
        if is_held_out(*pair) == examination and (pair in numbers or not value)
    }
    return World(inbox, asked, numbers)


def is_held_out(person: str, topic: str) -> bool:
    """Whether a pair is left to the examination."""
    return hashlib.sha256(f"{person} {topic}".encode()).digest()[0] % 5 == 0


@dataclass(frozen=True)
class _Arriving:
    """A mail, when it comes (from 0 to 1), and the pair that asks for a meeting with it."""

    time: float
    mail: Email
    asks: Pair | None


def _drawn(rng: random.Random, emails: int, examination: bool) -> tuple[dict[Pair, Wish], list[_Arriving]]:
    """Who wants what, and mails about it: as many as asked for or one more, or all there can be."""
    to_learn_from = _shuffled(rng, held_out=False)
    pairs = _shuffled(rng, held_out=True) + to_learn_from if examination else to_learn_from
    free = set(pairs)
    wishes: dict[Pair, Wish] = {}
    arriving: list[_Arriving] = []
    for place, pair in enumerate(pairs):
        if len(arriving) >= emails:
            break
        if pair not in free:
            continue  # has written about somebody else's wish
        free.discard(pair)
        kind = rng.choice(tuple(VALUES))
        value = rng.choice(VALUES[kind]) if place % _ABSENT else None
        wishes[pair] = (kind, value)
        if value:
            arriving += _mails(rng, pair, kind, value, free)
    return wishes, arriving


def _mails(rng: random.Random, pair: Pair, kind: str, value: str, free: set[Pair]) -> list[_Arriving]:
    """The mail that asks, and perhaps one by somebody else who mentions it and then is not free to ask."""
    person, topic = pair
    time = rng.random()
    mails = [_Arriving(time, Email(_date(time), person, topic, ASKS[kind].format(topic=topic, value=value)), pair)]
    others = sorted(other for other, about in free if about == topic and not is_held_out(other, about))
    if others and rng.random() < _P_MENTIONED:
        other = rng.choice(others)
        free.discard((other, topic))
        another = rng.choice([each for each in VALUES[kind] if each != value])
        body = MENTIONS.format(topic=topic, person=person, value=another)
        time = rng.uniform(time, 1) if rng.random() < _P_MENTION_IS_NEWER else rng.uniform(0, time)
        mails.append(_Arriving(time, Email(_date(time), other, topic, body), None))
    return mails


def _date(time: float) -> str:
    return DATES[min(int(time * len(DATES)), len(DATES) - 1)]


def _shuffled(rng: random.Random, *, held_out: bool) -> list[Pair]:
    pairs = [pair for pair in _pairs() if is_held_out(*pair) == held_out]
    rng.shuffle(pairs)
    return pairs


@cache
def _pairs() -> tuple[Pair, ...]:
    return tuple((person, topic) for person in PEOPLE for topic in TOPICS)


def main() -> None:
    """Write an inbox and questions about it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (%(default)s)")
    parser.add_argument("--emails", type=int, default=500, help="how many (%(default)s)")
    parser.add_argument("--questions", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("inbox.db"), help="file that must not be there (%(default)s)")
    asked = parser.parse_args()
    if asked.out.exists():
        parser.error(f"{asked.out} is there already; name another file")
    world = make(str(asked.seed), asked.emails, path=asked.out)
    questions = world.questions(asked.questions, str(asked.seed))
    write((each.question for each in questions), asked.out.with_suffix(".jsonl"))
    world.inbox.close()


if __name__ == "__main__":
    main()
