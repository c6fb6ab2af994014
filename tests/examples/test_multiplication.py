"""The multiplication example: its problems, how answers are read, what a beginner does, and a rollout."""

from __future__ import annotations

import random
import re

import pytest

from tests.examples.load import load

example = load("multiplication", "agent", "problems")
Problem = example.agent.Problem


def test_held_out_problems_are_asked_by_nobody_else():
    held_out = set(example.problems.held_out())
    assert len(held_out) == 87
    for seed in ("0 0", "0 1", "1 0"):
        lessons = example.problems.lessons(24, seed)
        assert len(set(lessons)) == 24 and not held_out & set(lessons)
        assert lessons == example.problems.lessons(24, seed)
    rng = random.Random(0)
    asked = {example.problems._beginner(rng)[0]["content"] for _ in range(3000)}
    assert not asked & {problem.question for problem in held_out}


def test_a_beginner_mostly_adds_and_knows_how_to_multiply():
    rng, right, products = random.Random(0), 0, 0
    for _ in range(1000):
        question, answer = example.problems._beginner(rng)
        factors = re.search(r"(\d+) x (\d+)", question["content"])
        if factors:
            products += 1
            right += example.agent.is_right(Problem(*map(int, factors.groups())), answer["content"])
        else:
            assert eval(answer["content"].replace("=", "==")) is True
    assert 0.3 < right / products < 0.4


@pytest.mark.parametrize(
    ("answer", "right"),
    [("80 + 12 = 92", True), ("It is 92.", True), ("92, not 93", False), ("23 + 4 = 27", False), ("", False)],
)
def test_the_last_number_counts(answer: str, right: bool):
    assert example.agent.is_right(Problem(23, 4), answer) is right
