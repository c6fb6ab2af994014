"""The gate: which turns are asked, what the judge may see, and when it says yes."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest

from art_patch.gate import GateConfig, Turn, contest, decide, held_out_turns
from art_patch.records import Choice
from tests.factory import make_call, make_group, make_trajectory


def pairs(differences: list[float], base: float = 0.5) -> list[tuple[str, float, float]]:
    return [(f"s{n}", base + d, base) for n, d in enumerate(differences)]


def test_a_clear_winner_is_promoted():
    verdict = decide(pairs([0.3, 0.2, 0.4, 0.1] * 5), GateConfig())
    assert verdict.promote
    assert verdict.figures["difference"] == pytest.approx(0.25)
    assert 0 < verdict.figures["lower_bound"] < 0.25


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([], "8 more are needed"),
        (pairs([0.9] * 7), "1 more are needed"),
        (pairs([0.0] * 20), "not above the margin"),
        (pairs([-0.3] * 20), "not above the margin"),
        (pairs([0.5, -0.5] * 10), "not above the margin"),
        ([*pairs([0.5] * 20), ("bad", math.nan, 0.0)], "bad is not finite"),
        ([*pairs([0.5] * 20), ("bad", 0.0, math.inf)], "bad is not finite"),
    ],
)
def test_everything_else_is_rejected_with_the_reason(scores: list[tuple[str, float, float]], words: str):
    verdict = decide(scores, GateConfig())
    assert not verdict.promote
    assert words in verdict.reason


def test_turns_of_one_scenario_do_not_count_as_independent():
    assert not decide([("one", 1.0, 0.0)] * 50, GateConfig()).promote


def test_an_equal_candidate_is_rarely_promoted():
    rng = random.Random(0)
    promoted = sum(
        decide([(f"s{n}", rng.random(), rng.random()) for n in range(40)], GateConfig(), seed=trial).promote
        for trial in range(200)
    )
    assert promoted <= 20  # 5 % expected


def test_a_margin_must_be_beaten_by_the_bound():
    scores = pairs([0.1] * 20)
    assert decide(scores, GateConfig(margin=0.05)).promote
    assert not decide(scores, GateConfig(margin=0.15)).promote


def test_turns_are_spread_over_depths_and_untrainable_calls_left_out():
    deep = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}, {"role": "user", "content": "x"})
    group = make_group(
        make_trajectory("a", make_call("a1", prompt=(1,)), make_call("a2", prompt=(1, 2), messages=deep)),
        make_trajectory(
            "b", make_call("b1", prompt=(1,)), make_call("b2", prompt=(1, 3), messages=deep, untrainable="no")
        ),
    )
    turns = held_out_turns([group], scenarios=5, turns_per_scenario=2, seed=1)
    assert sorted(turn.call.prompt_token_ids or () for turn in turns) == [(1,), (1, 2)]
    assert len(held_out_turns([group], scenarios=5, turns_per_scenario=1, seed=1)) == 1
    assert held_out_turns([group], scenarios=0, turns_per_scenario=2, seed=1) == ()


def test_the_judge_is_not_told_who_answered():
    numbers = count()
    turn = Turn("task:x", make_call(policy="agent@3"))
    ours = [Choice(0, {"role": "assistant", "content": "new"}, "stop", (1,), (-0.1,))]
    theirs = [Choice(0, {"role": "assistant", "content": "old"}, "stop", (2,), (-0.2,))] * 2
    group, of_candidate = contest(turn, ours, theirs, new_id=lambda: f"id{next(numbers)}")
    assert [t.calls[0].choices[0].message["content"] for t in group.trajectories if t.id in of_candidate] == ["new"]
    assert len(group.trajectories) == 3
    for trajectory in group.trajectories:
        assert trajectory.calls[0].policy is None
        assert trajectory.calls[0].choices[0].token_ids is None
        assert trajectory.calls[0].messages == turn.call.messages
