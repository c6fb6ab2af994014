"""The example tic_tac_toe: rules, which matches there are, how answers are read, a match against a scripted model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import art_patch as art
from tests.examples.load import load
from tests.support.servers import Answer, completion, no_certificates, serving

example = load("tic_tac_toe", "game", "agent", "matches", "rollout")
game, agent, matches = example.game, example.agent, example.matches


@pytest.mark.parametrize(
    ("board", "won", "over"),
    [
        ("XXXOO....", "X", True),
        ("XXOXO.O..", "O", True),
        ("XOXXOOOXX", None, True),
        ("XO.......", None, False),
    ],
)
def test_a_game_is_over_with_a_line_or_without_a_free_cell(board: str, won: str | None, over: bool):
    assert (game.winner(board), game.is_over(board)) == (won, over)


def test_sides_take_turns_and_a_taken_cell_is_no_move():
    board = game.moved(game.moved(game.EMPTY, 5), 1)
    assert board == "O...X...." and game.side_to_move(board) == "X" and game.free_cells(board) == [2, 3, 4, 6, 7, 8, 9]
    for cell in (0, 5, 10):
        with pytest.raises(ValueError, match="not free"):
            game.moved(board, cell)


def test_cells_that_complete_a_line():
    assert game.completing("XX.OO....", "X") == [3] and game.completing("XX.OO....", "O") == [6]
    assert game.completing("X.X.O.X.O", "X") == [2, 4] and game.completing(game.EMPTY, "X") == []


def test_each_side_sees_its_own_marks_as_x():
    lines = ["X1 O2 3", "4 X5 6", "7 8 9", "X1 4 7", "O2 X5 8", "3 6 9", "X1 X5 9", "3 X5 7"]
    assert game.as_lines("XO..X....", "X") == lines
    assert game.as_lines("XO..X....", "O")[:3] == ["O1 X2 3", "4 O5 6", "7 8 9"]
    asked = agent.prompt("XO..X....")
    lines = ["O1 X2 3", *game.as_lines("XO..X....", "O")[1:]]
    assert asked == "\n".join([agent.RULES, *lines, "Free: 3 4 6 7 8 9", agent.QUESTION.strip()])


@pytest.mark.parametrize(
    ("answer", "cell"), [("win 3", 3), ("not 1 but **7**.", 7), ("99", 99), ("no", None), ("", None)]
)
def test_an_answer_is_its_last_number(answer: str, cell: int | None):
    assert agent.cell_of(answer) == cell


def test_half_of_the_examination_is_on_each_side_and_no_lesson_shares_its_luck():
    asked, learned = matches.held_out(), [*matches.lessons(24, "0 0"), *matches.lessons(24, "0 1")]
    assert asked == matches.held_out() and matches.lessons(24, "0 0") == learned[:24]
    assert [game.side_to_move(each.opening) for each in asked] == ["X", "O"] * 100
    assert {each.opponent for each in asked} == {"random"}
    assert {each.opponent for each in learned[:4]} == set(matches.OPPONENTS)
    assert len({each.seed for each in (*asked, *learned)}) == len(asked) + len(learned)
    assert not any(game.is_over(each.opening) for each in learned)


@pytest.mark.parametrize(
    ("opening", "answers", "end", "reward"),
    [
        ("XX.OO....", ["win 3"], "wins", 1.0),
        ("XX.OO....", ["take 9", "win 6"], "losses", 0.0),
        ("XX.OO....", ["take 1"], "illegal", -0.5),
        ("XX.OO....", ["take 9", "I give up"], "wins", 1.0),  # by the opponent's illegal answer
        ("XX.OO...X", ["win 6"], "wins", 1.0),
        ("XOXOOX.X.", ["block 9", "take 7"], "draws", 0.5),
    ],
)
def test_a_match_is_rewarded_by_its_end(tmp_path: Path, opening: str, answers: list[str], end: str, reward: float):
    with no_certificates(tmp_path), serving() as server:
        server.will(*(Answer(body=json.dumps(completion({"model": "m"}, content=each)).encode()) for each in answers))
        player = art.Model(name="m", project="p", inference_base_url=server.url, inference_api_key="k")
        match = matches.Match(opening, "itself", "seed")
        run = asyncio.run(example.rollout.rollout(player, match, player))
        boards = [each.body["messages"][0]["content"] for each in server.seen]
    ends = {"wins": False, "draws": False, "losses": False, "illegal": False, end: True}
    good = end in ("wins", "draws")
    assert (run.reward, run.metrics) == (reward, {"win_or_draw": good, "against_itself": good, **ends})
    assert [each.messages()[0]["content"] for each in run.histories()] == boards[::2]
    assert run.metadata == {"side": game.side_to_move(opening), "opponent": "itself"}
