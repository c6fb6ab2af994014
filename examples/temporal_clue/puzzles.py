"""Murder puzzles: who, where, when and with what; each with exactly one solution, proven by trying all of them.

- A puzzle is drawn from a seed: first the crime, then an evening in which everybody and every weapon is somewhere at
  each hour, then clues that are true of both. Clues are added while they rule something out, until one crime is left;
  then those that the others make needless are dropped.
- A clue is data: a kind and its values. The table of kinds says how it reads and which crimes it allows, so the solver
  and the reader go by the same clue.
- One puzzle in five is held out, by a hash of its clues, whatever their order, that no seed moves.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, NamedTuple

SUSPECTS = ("Ann", "Bob", "Cleo", "Dan", "Eve")
ROOMS = ("hall", "kitchen", "library", "cellar", "attic")
HOURS = ("eight", "nine", "ten", "eleven")
WEAPONS = ("knife", "rope", "poison", "candlestick", "pistol")

_P_RIGHT = 0.35
"""Of a beginner's answers; in the others all is ruled out by a clue, so that learning has to change the mind."""


class Crime(NamedTuple):
    """Who did it, where, when and with what."""

    who: str
    where: str
    when: str
    what: str


@dataclass(frozen=True)
class Size:
    """How many there are of each, which kinds of clue, and whether the answer is thought through first.

    Where it is not, clues are sorted by what they are about.
    """

    suspects: int
    rooms: int
    hours: int
    weapons: int
    kinds: tuple[str, ...]
    think: bool

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """What each part of the answer is chosen from."""
        return SUSPECTS[: self.suspects], ROOMS[: self.rooms], HOURS[: self.hours], WEAPONS[: self.weapons]


_KINDS: dict[str, tuple[str, Callable[..., bool]]] = {
    "not who": ("It was not {}.", lambda crime, who: crime.who != who),
    "not where": ("It was not in the {}.", lambda crime, room: crime.where != room),
    "not when": ("It was not at {}.", lambda crime, hour: crime.when != hour),
    "not what": ("It was not with the {}.", lambda crime, weapon: crime.what != weapon),
    "before": ("It was before {}.", lambda crime, hour: HOURS.index(crime.when) < HOURS.index(hour)),
    "after": ("It was after {}.", lambda crime, hour: HOURS.index(crime.when) > HOURS.index(hour)),
    "never": ("{} never touched the {}.", lambda crime, who, weapon: (crime.who, crime.what) != (who, weapon)),
    "empty": ("At {} nobody was in the {}.", lambda crime, hour, room: (crime.when, crime.where) != (hour, room)),
    "seen": (
        "At {} {} was in the {}.",
        lambda crime, hour, who, room: (crime.when, crime.who) != (hour, who) or crime.where == room,
    ),
    "lay": (
        "At {} the {} lay in the {}.",
        lambda crime, hour, weapon, room: (crime.when, crime.what) != (hour, weapon) or crime.where == room,
    ),
}

SMALL = Size(3, 2, 2, 2, ("not who", "not where", "not when", "not what", "before", "after"), think=False)
"""For a tiny model: each part by elimination."""
FULL = Size(5, 5, 4, 5, tuple(_KINDS), think=True)
"""For a real one: 500 crimes, clues that say something in combination only."""


@dataclass(frozen=True)
class Clue:
    """One fact: its kind, and what fills the blanks."""

    kind: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        """As it is read."""
        return _KINDS[self.kind][0].format(*self.values)

    def allows(self, crime: Crime) -> bool:
        """Whether it leaves this crime possible."""
        return _KINDS[self.kind][1](crime, *self.values)


@dataclass(frozen=True)
class Puzzle:
    """Clues, and the one crime that they leave."""

    size: Size
    clues: tuple[Clue, ...]
    crime: Crime

    @property
    def question(self) -> str:
        """What the agent is asked."""
        clues = "\n".join(map(str, self.clues))
        if not self.size.think:
            return f"{clues}\nWho did it, where, when and with what? Answer with four words."
        names = ("Suspects", "Rooms", "Hours", "Weapons")
        cast = "\n".join(f"{name}: {', '.join(values)}." for name, values in zip(names, self.size.choices, strict=True))
        return (
            f"The butler was murdered.\n{cast}\nMurderer and weapon were in the room of the crime at its hour.\n"
            f"{clues}\nWho did it, where, when and with what? Think it through, then end with one line: "
            "suspect, room, hour, weapon."
        )


def solutions(size: Size, clues: Iterable[Clue]) -> list[Crime]:
    """All crimes that the clues leave."""
    asked = list(clues)
    return [crime for crime in map(Crime._make, product(*size.choices)) if all(clue.allows(crime) for clue in asked)]


def make_puzzle(size: Size, rng: random.Random) -> Puzzle:
    """Draw a puzzle."""
    crime = Crime(*(rng.choice(values) for values in size.choices))
    facts = [clue for clue in _facts(size, crime, rng) if clue.kind in size.kinds and clue.allows(crime)]
    rng.shuffle(facts)
    clues: list[Clue] = []
    left = solutions(size, clues)
    while len(left) > 1:
        clue = facts.pop()
        allowed = [each for each in left if clue.allows(each)]
        if len(allowed) < len(left):
            clues.append(clue)
            left = allowed
    for clue in list(clues):
        without = [each for each in clues if each != clue]
        if len(solutions(size, without)) == 1:
            clues = without
    rng.shuffle(clues)
    if not size.think:
        clues.sort(key=lambda clue: [clue.values[0] in values for values in size.choices].index(True))
    return Puzzle(size, tuple(clues), crime)


def held_out(size: Size, count: int = 40) -> list[Puzzle]:
    """The puzzles of the examination."""
    return list(islice(_puzzles(size, random.Random("held out"), of_held_out=True), count))


def lessons(size: Size, count: int, seed: str) -> list[Puzzle]:
    """Puzzles to learn from, drawn anew for each seed."""
    return list(islice(_puzzles(size, random.Random(seed), of_held_out=False), count))


def _facts(size: Size, crime: Crime, rng: random.Random) -> Iterator[Clue]:
    """All that could be told, each kind with every value; those of the evening as it went."""
    suspects, rooms, hours, weapons = size.choices
    place = {(hour, each): rng.choice(rooms) for hour in hours for each in (*suspects, *weapons)}
    place |= {(crime.when, crime.who): crime.where, (crime.when, crime.what): crime.where}
    excluded = (("not who", suspects), ("not where", rooms), ("not when", hours), ("not what", weapons))
    for kind, values in (*excluded, ("before", hours), ("after", hours)):
        yield from (Clue(kind, (value,)) for value in values)
    yield from (Clue("never", pair) for pair in product(suspects, weapons))
    for hour, room in product(hours, rooms):
        if all(place[hour, who] != room for who in suspects):
            yield Clue("empty", (hour, room))
    for (hour, each), room in place.items():
        yield Clue("seen" if each in suspects else "lay", (hour, each, room))


def _puzzles(size: Size, rng: random.Random, *, of_held_out: bool) -> Iterator[Puzzle]:
    while True:
        puzzle = make_puzzle(size, rng)
        if _is_held_out(puzzle) == of_held_out:
            yield puzzle


def _is_held_out(puzzle: Puzzle) -> bool:
    told = "\n".join(sorted(map(str, puzzle.clues)))
    return hashlib.sha256(told.encode()).digest()[0] % 5 == 0


def beginner(rng: random.Random) -> list[dict[str, Any]]:
    """A small puzzle as the tiny stand-in has seen it done: it can say what is left, and mostly says what is named."""
    (puzzle,) = islice(_puzzles(SMALL, rng, of_held_out=False), 1)
    told = [value for clue in puzzle.clues for value in clue.values]
    named = [next(value for value in told if value in values) for values in SMALL.choices]
    said = f"Left: {', '.join(puzzle.crime)}" if rng.random() < _P_RIGHT else f"Named: {', '.join(named)}"
    return [{"role": "user", "content": puzzle.question}, {"role": "assistant", "content": said}]
