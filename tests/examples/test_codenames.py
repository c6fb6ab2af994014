"""The game of examples/codenames: boards, clues, guesses and what they are worth."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

import art_patch as art
from tests.examples.load import load
from tests.support.servers import Answer, completion, no_certificates, serving

example = load("codenames", "game", "agent", "rollout")
game, agent, rollout = example.game, example.agent, example.rollout


@pytest.fixture
def board():
    words = ("cat", "rain", "horse", "saw", "red", "piano")
    return game.Board(game.SMALL, words, frozenset({"cat", "horse"}), assassin="piano")


def test_a_board_is_as_large_as_it_should_be():
    for seed in range(100):
        small = game.make_board(game.SMALL, random.Random(seed))
        (own,) = {game.CATEGORY[word] for word in small.team}
        assert {word for word in small.words if game.CATEGORY[word] == own} == small.team
        full = game.make_board(game.FULL, random.Random(seed))
        for drawn, size in ((small, game.SMALL), (full, game.FULL)):
            assert len(set(drawn.words)) == size.words
            assert size.team[0] <= len(drawn.team) <= size.team[1]
            assert drawn.assassin in set(drawn.words) - drawn.team


def test_the_same_seed_draws_the_same_boards_and_none_is_of_the_examination():
    small = game.SMALL
    lessons = game.lessons(small, 300, seed="1")
    assert lessons == game.lessons(small, 300, seed="1")
    assert lessons != game.lessons(small, 300, seed="2")
    examination = {(frozenset(board.words), board.assassin) for board in game.held_out(small)}
    assert not examination & {(frozenset(board.words), board.assassin) for board in lessons}


@pytest.mark.parametrize(
    ("said", "clue"),
    [
        ("animal 2", ("animal", 2)),
        ("My clue: **Animal**, 2.", ("animal", 2)),
        ("animal", None),
        ("animal 0", None),
        ("cat 2", None),
        ("", None),
    ],
)
def test_a_clue_is_a_word_that_is_not_on_the_board_and_a_number(board, said: str, clue):
    assert game.read_clue(board, said) == clue


@pytest.mark.parametrize(
    ("said", "found", "killed", "reward"),
    [
        ("cat, horse", {"cat", "horse"}, False, 1.0),
        ("I guess Horse and cat, then rain.", {"cat", "horse"}, False, 1.0),
        ("cat", {"cat"}, False, 0.5),
        ("rain, cat", {"rain"}, False, 0.0),
        ("cat, piano, horse", {"cat", "piano"}, True, -0.5),
        ("dog", set(), False, 0.0),
    ],
)
def test_guesses_count_until_one_is_wrong(board, said, found, killed, reward):
    end = game.guess(board, game.read_guesses(board, said, 2))
    assert (end.open, end.killed, end.reward) == (found, killed, reward)
    assert end.is_over == (killed or found == {"cat", "horse"})


def test_both_roles_are_conversations_of_one_game(board, tmp_path):
    def told(text: str) -> Answer:
        return Answer(body=json.dumps(completion({"model": "m"}, content=text)).encode())

    with no_certificates(tmp_path), serving() as server:
        server.will(told("animal 2"), told("cat, rain"))
        model = art.Model(name="m", project="p", inference_base_url=server.url)
        run = asyncio.run(rollout.rollout(model, board))
    assert (run.reward, run.metrics) == (0.5, {"found": 0.5, "assassin": False, "won": False})
    spymaster, guesser = (history.messages() for history in run.histories())
    assert spymaster[0]["content"] == game.spymaster_prompt(board)
    assert guesser[0]["content"] == game.guesser_prompt(board, "animal", 2)
    assert "Assassin" not in guesser[0]["content"]


def test_a_clue_that_is_none_ends_the_turn(board, tmp_path):
    with no_certificates(tmp_path), serving() as server:
        server.will(Answer(body=json.dumps(completion({"model": "m"}, content="cat 2")).encode()))
        model = art.Model(name="m", project="p", inference_base_url=server.url)
        run = asyncio.run(rollout.rollout(model, board))
    assert (run.reward, len(run.histories())) == (0.0, 1)
