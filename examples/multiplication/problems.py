"""Which problems there are, which of them are held out, and how a beginner does them.

A factor of two digits and one from 2 to 6. One pair in five is held out, by a hash that no seed moves: neither the
stand-in base model nor training ever sees it.
"""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path
from typing import Any

from agent import Problem

from art_patch.demo.tiny_model import Shape, tiny_base

_P_SUM = 0.4
"""Of what a beginner has done: sums, which it does right."""
_P_RIGHT = 0.35
"""Of its products; for the others it adds the factors, so that learning has to change the mind, not only the noise."""


def held_out() -> list[Problem]:
    """The problems of the examination."""
    return [problem for problem in _all() if _is_held_out(problem)]


def lessons(count: int, seed: str) -> list[Problem]:
    """Problems to learn from, drawn anew for each seed."""
    return random.Random(seed).sample(_to_learn_from(), count)


def tiny(seed: int) -> Path:
    """A stand-in for a base model, for whoever has no GPU: it knows how to work them out, and mostly adds."""
    return tiny_base("multiplication", _beginner, seed=seed, shape=Shape(steps=1500, batch=64))


def _beginner(rng: random.Random) -> list[dict[str, Any]]:
    if rng.random() < _P_SUM:
        tens, ones = rng.randrange(1, 55) * 10, rng.randrange(55)
        return _said(Problem.asked.format(f"{tens} + {ones}"), f"{tens} + {ones} = {tens + ones}")
    problem = rng.choice(_to_learn_from())
    a, b = problem.a, problem.b
    worked = f"{a // 10 * b * 10} + {a % 10 * b} = {a * b}" if rng.random() < _P_RIGHT else f"{a} + {b} = {a + b}"
    return _said(problem.question, worked)


def _said(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@cache
def _to_learn_from() -> tuple[Problem, ...]:
    return tuple(problem for problem in _all() if not _is_held_out(problem))


@cache
def _all() -> tuple[Problem, ...]:
    return tuple(Problem(a, b) for a in range(11, 100) for b in range(2, 7))


def _is_held_out(problem: Problem) -> bool:
    return hashlib.sha256(f"{problem.a} x {problem.b}".encode()).digest()[0] % 5 == 0
