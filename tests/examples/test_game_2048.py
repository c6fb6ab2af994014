"""The example game_2048: rules, which games there are, the agent against a scripted model, rewards."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.examples.load import load
from tests.support.servers import Answer, StubServer, completion, no_certificates, serving

example = load("game_2048", "game", "agent", "games", "rollout")
game, agent, games, rollout = example.game, example.agent, example.games, example.rollout

START = ((2, 0, 0, 2), (4, 4, 4, 4), (2, 2, 4, 8), (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("direction", "board", "gained"),
    [
        ("left", ((4, 0, 0, 0), (8, 8, 0, 0), (4, 4, 8, 0), (0, 0, 0, 0)), 24),
        ("right", ((0, 0, 0, 4), (0, 0, 8, 8), (0, 4, 4, 8), (0, 0, 0, 0)), 24),
        ("up", ((2, 4, 8, 2), (4, 2, 0, 4), (2, 0, 0, 8), (0, 0, 0, 0)), 8),
        ("down", ((0, 0, 0, 0), (2, 0, 0, 2), (4, 4, 0, 4), (2, 2, 8, 8)), 8),
    ],
)
def test_tiles_are_pushed_and_each_merges_once(direction: str, board: Any, gained: int):
    assert game.pushed(START, direction) == (board, gained)


def test_what_changes_nothing_is_illegal_and_a_full_board_without_equals_is_the_end():
    full = ((2, 4, 2, 4), (4, 2, 4, 2)) * 2
    assert game.Game("s", full).legal() == []
    packed = game.Game("s", ((2, 0, 0, 0), (4, 0, 0, 0), (8, 0, 0, 0), (16, 0, 0, 0)))
    assert packed.legal() == ["right"] and packed.move("left") is None
    with pytest.raises(ValueError, match="not a direction"):
        packed.move("sideways")


def test_the_same_seed_and_moves_are_the_same_game():
    def played(seed: str) -> Any:
        now, rng = game.new_game(seed), random.Random(0)
        for _ in range(30):
            now = now.move(rng.choice(now.legal()))
        return now

    one = played("a")
    assert one == played("a") and one.board != played("b").board and one.moves == 30
    assert sum(map(sum, one.board)) >= 2 * 32 and one.score > one.max_tile


def test_no_game_is_in_two_sets_and_the_sensible_move_is_legal():
    seeds = [each.seed for each in (*games.held_out(), *games.lessons(20, "0 0"), *games.lessons(20, "0 1"))]
    assert len(set(seeds)) == len(seeds) == 48 + 40
    assert games.held_out() == games.held_out() and games.held_out(3) == games.held_out()[:3]
    assert all(games.sensible(each) in each.legal() for each in games.held_out())
    assert games.sensible(game.Game("s", ((0, 0, 0, 2), (0, 0, 0, 2), (0, 0, 0, 0), (0, 0, 0, 0)))) == "down"


@pytest.mark.parametrize(
    ("answer", "direction"),
    [("left", "left"), ("Up or right? **Down**.", "down"), ("RIGHT", "right"), ("no idea", None), ("", None)],
)
def test_an_answer_is_its_last_direction(answer: str, direction: str | None):
    assert agent.read(answer) == direction


async def played(server: StubServer, start: Any, limit: int, scripts: list[list[str]]) -> list[Any]:
    """The same game with each script of answers; what was asked is what the conversations say."""
    ended: list[Any] = []
    async with AsyncOpenAI(base_url=server.url, api_key="k") as client:
        for answers in scripts:
            server.reset()
            bodies = (json.dumps(completion({"model": "m"}, content=each)).encode() for each in answers)
            server.will(*(Answer(body=body) for body in bodies))
            ended.append(await agent.play(client, "m", start, limit))
            assert [each.body["messages"] for each in server.seen] == [each[:-1] for each in ended[-1].conversations]
    return ended


def test_a_game_is_played_until_its_limit_or_an_illegal_answer(tmp_path: Path):
    start = game.Game("s", ((2, 4, 2, 4), (0,) * 4, (0,) * 4, (0,) * 4))
    scripts = [["down", "I say up"], ["down", "what?"], ["up"]]
    with serving() as server, no_certificates(tmp_path):
        full, unread, refused = asyncio.run(played(server, start, 2, scripts))
    assert full.game == start.move("down").move("up") and not full.illegal
    assert unread.game == start.move("down") and unread.illegal and len(unread.conversations) == 2
    assert refused.game == start and refused.illegal and len(refused.conversations) == 1


def test_the_board_is_shown_in_columns():
    assert agent.drawn(START[:2]) == "    2    .    .    2\n    4    4    4    4"


def test_a_better_game_has_the_larger_reward_and_an_illegal_end_costs():
    def rewarded(score: int, illegal: bool) -> float:
        return rollout.reward(agent.Played(game.Game("s", START, score=score), [], illegal))

    assert rewarded(0, True) == -1 and rewarded(255, False) == 8
    assert rewarded(60, True) < rewarded(60, False) < rewarded(100, False)
