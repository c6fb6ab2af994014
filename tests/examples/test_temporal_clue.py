"""The puzzles of examples/temporal_clue: one solution each, held out by their clues, read leniently."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

import art_patch as art
from tests.examples.load import load
from tests.support.servers import Answer, completion, no_certificates, serving

example = load("temporal_clue", "puzzles", "agent", "rollout")
puzzles, agent, rollout = example.puzzles, example.agent, example.rollout


@pytest.mark.parametrize(("size", "count"), [("SMALL", 30), ("FULL", 3)])
def test_a_puzzle_has_one_solution_and_no_needless_clue(size: str, count: int):
    for seed in range(count):
        puzzle = puzzles.make_puzzle(getattr(puzzles, size), random.Random(seed))
        assert puzzles.solutions(puzzle.size, puzzle.clues) == [puzzle.crime]
        for left_out in puzzle.clues:
            others = [clue for clue in puzzle.clues if clue != left_out]
            assert len(puzzles.solutions(puzzle.size, others)) > 1


def test_the_same_seed_draws_the_same_puzzles_and_none_is_of_the_examination():
    small = puzzles.SMALL
    lessons = puzzles.lessons(small, 40, seed="1")
    assert lessons == puzzles.lessons(small, 40, seed="1")
    assert lessons != puzzles.lessons(small, 40, seed="2")
    examination = {frozenset(puzzle.clues) for puzzle in puzzles.held_out(small, 40)}
    assert len(examination) >= 5
    assert not examination & {frozenset(puzzle.clues) for puzzle in lessons}


def test_each_kind_of_clue_says_what_it_allows():
    crime = puzzles.Crime("Ann", "hall", "nine", "rope")
    told = {
        ("not who", "Ann"): ("It was not Ann.", False),
        ("not where", "attic"): ("It was not in the attic.", True),
        ("not when", "nine"): ("It was not at nine.", False),
        ("not what", "knife"): ("It was not with the knife.", True),
        ("before", "nine"): ("It was before nine.", False),
        ("after", "eight"): ("It was after eight.", True),
        ("never", "Ann", "rope"): ("Ann never touched the rope.", False),
        ("empty", "nine", "hall"): ("At nine nobody was in the hall.", False),
        ("seen", "nine", "Ann", "attic"): ("At nine Ann was in the attic.", False),
        ("seen", "ten", "Ann", "attic"): ("At ten Ann was in the attic.", True),
        ("lay", "nine", "rope", "hall"): ("At nine the rope lay in the hall.", True),
    }
    clues = [puzzles.Clue(kind, tuple(values)) for kind, *values in told]
    assert [(str(clue), clue.allows(crime)) for clue in clues] == list(told.values())


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("Ann, hall, nine, rope", 1.0),
        ("It cannot be Bob.\n\n**Answer:** ann, the HALL, at nine, Rope.\n", 1.0),
        ("Ann, kitchen, nine, knife", 0.5),
        ("Ann or Bob, hall, nine, rope", 0.75),
        ("Ann, hall, nine, rope\nI am sure.", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_line_is_what_counts(answer: str, share: float):
    crime = puzzles.Crime("Ann", "hall", "nine", "rope")
    puzzle = puzzles.Puzzle(puzzles.SMALL, (), crime)
    assert agent.share_right(puzzle, answer) == share


def test_a_rollout_is_worth_what_the_agent_has_right(tmp_path):
    puzzle = puzzles.make_puzzle(puzzles.SMALL, random.Random(3))
    half = f"{puzzle.crime.who}, {puzzle.crime.where}"
    with no_certificates(tmp_path), serving() as server:
        server.always = Answer(body=json.dumps(completion({"model": "m"}, content=half)).encode())
        model = art.Model(name="m", project="p", inference_base_url=server.url)
        run = asyncio.run(rollout.rollout(model, puzzle))
    assert (run.reward, run.metrics) == (0.5, {"right": 0.5, "solved": False})
    assert run.messages()[0] == {"role": "user", "content": puzzle.question}


def test_the_beginner_answers_in_the_form_that_is_asked_for():
    for seed in range(20):
        asked, said = puzzles.beginner(random.Random(seed))
        assert asked["role"] == "user"
        assert said["content"].count(", ") == 3
