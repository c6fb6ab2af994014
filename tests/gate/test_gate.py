"""The gate: which turns are asked, what the judge may see, and when it says yes."""

from __future__ import annotations

import math
import random
from itertools import count
from typing import Any

import pytest

from art_patch.errors import ConfigError
from art_patch.gate import (
    Finding,
    GateConfig,
    HeldOut,
    Turn,
    blind_answers,
    data_hash,
    decide,
    held_out_turns,
    new_users,
    not_worse,
    with_findings,
)
from art_patch.types import Choice, Group
from tests.support.factory import make_call, make_group, make_trajectory


def pairs(differences: list[float], base: float = 0.5) -> list[tuple[str, float, float]]:
    return [(f"s{n}", base + d, base) for n, d in enumerate(differences)]


def test_a_clear_winner_is_promoted_and_it_says_what_is_proven():
    verdict = decide(pairs([0.3, 0.2, 0.4, 0.1] * 10), GateConfig())
    assert verdict.promote
    assert verdict.metrics["difference"] == pytest.approx(0.25)
    assert 0 < verdict.metrics["lower_bound"] < 0.25
    assert verdict.reason == (
        "scores 0.750 against 0.500 on 40 held-out scenarios, a difference of +0.250; "
        "proven better: if both were equal, a result like this comes up at most once in twenty times"
    )
    few = decide(pairs([0.3, 0.2, 0.4, 0.1] * 10), GateConfig(level=0.96, margin=-0.1))
    assert few.reason.endswith("if it were worse by 0.1, a result like this comes up at most once in 25 times")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([], "cannot decide: 0 held-out scenarios; 30 more are needed"),
        (pairs([0.9] * 29), "cannot decide: 29 held-out scenarios; 1 more are needed"),
        (pairs([0.0] * 40), "a tie"),
        (pairs([-0.3] * 40), "not proven better: if both were equal, a result like this comes up more than once in"),
        (pairs([0.5, -0.5] * 20), "not proven better"),
        ([*pairs([0.5] * 40), ("bad", math.nan, 0.0)], "bad is not finite"),
        ([*pairs([0.5] * 40), ("bad", 0.0, math.inf)], "bad is not finite"),
    ],
)
def test_everything_else_is_rejected_with_the_reason(scores: list[tuple[str, float, float]], words: str):
    verdict = decide(scores, GateConfig())
    assert not verdict.promote and not verdict.needs_canary
    assert words in verdict.reason


def test_it_says_what_is_missing():
    assert decide(pairs([0.9] * 3), GateConfig()).metrics == {"scenarios": 3, "more_needed": 27}
    assert decide(pairs([0.9] * 3), GateConfig(min_scenarios=1)).metrics["more_needed"] == 2  # as 95 % takes five
    unclear = decide(pairs([0.5, -0.3] * 15), GateConfig())
    assert not unclear.promote
    assert f"about {unclear.metrics['more_needed']} more scenarios would show it" in unclear.reason
    tie = decide([(f"s{n}", 0.1 + 0.2, 0.3) for n in range(40)], GateConfig())
    assert (tie.promote, tie.reason.startswith("a tie"), "more_needed" in tie.metrics) == (False, True, False)
    worse = decide(pairs([0.0] * 40), GateConfig(margin=-0.1))
    assert (worse.promote, "proven not worse by more than 0.1" in worse.reason) == (True, True)
    rounding = decide(pairs([0.3, -0.3] * 19 + [1e-16, 0.0]), GateConfig())
    assert "more_needed" not in rounding.metrics


def test_a_check_that_speaks_of_few_users_goes_by_their_scenarios():
    scores = pairs([0.0] * 40)
    user_of = {key: f"u{n % 4}" for n, (key, _, _) in enumerate(scores)}
    assert not_worse("c", scores, allowed=0.1, level=0.95, user_of=user_of).passed
    slightly = [(key, ours - 0.001, theirs) for key, ours, theirs in scores]
    assert not_worse("c", slightly, allowed=0.1, level=0.95, user_of=user_of).passed


def test_scenarios_of_one_user_do_not_count_as_independent():
    scores = pairs([0.4, 0.3, -0.1, 0.2, -0.2, 0.1] * 10)
    assert decide(scores, GateConfig()).promote
    # The same scores, but each user likes it or does not.
    verdict = decide(scores, GateConfig(), user_of={key: f"u{n % 6}" for n, (key, *_) in enumerate(scores)})
    assert (verdict.promote, verdict.metrics["users"]) == (False, 6)
    assert "on 60 held-out scenarios of 6 users" in verdict.reason
    assert decide(scores, GateConfig(), user_of={"s0": "u0", "s1": None}).promote


def test_few_users_cannot_decide_and_a_canary_must():
    scores = pairs([0.3, 0.2] * 20)
    three = {key: f"u{n % 3}" for n, (key, *_) in enumerate(scores)}
    verdict = decide(scores, GateConfig(), user_of=three)
    assert (verdict.promote, verdict.needs_canary, verdict.metrics["users_needed"]) == (False, True, 5)
    assert verdict.reason.startswith(
        "cannot decide: the scenarios come from 3 users, at least 5 are needed to speak for others, so a canary must"
    )
    assert not decide(pairs([-0.3] * 40), GateConfig(), user_of=three).needs_canary
    failed = Finding("x", 1.0, 0.0, 0.1, False, "x got worse")
    assert not with_findings(verdict, [failed]).needs_canary
    assert decide(scores, GateConfig(), user_of={key: f"u{n % 5}" for n, (key, *_) in enumerate(scores)}).promote


def test_a_candidate_that_ruins_some_scenarios_is_rejected_by_name():
    scores = pairs([*[0.15] * 54, *[-0.45] * 6])
    assert decide(scores, GateConfig(worst_share=0)).promote
    verdict = decide(scores, GateConfig())
    assert not verdict.promote
    assert verdict.metrics["ruined"] == ["s54", "s55", "s56"]
    assert verdict.reason.endswith(
        "; but it ruins some: -0.450 in its worst 3 scenarios (s54, s55, s56), +0.150 in its best"
    )
    assert decide(pairs([*[0.15] * 54, *[-0.45] * 3, *[0.5] * 3]), GateConfig()).promote  # as much is gained elsewhere
    assert decide(pairs([*[0.02] * 57, *[-0.09] * 3]), GateConfig()).promote  # `max_worse`
    assert decide(scores, GateConfig(margin=-0.4)).promote  # a loss that the margin allows


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
    scores = pairs([0.1] * 30)
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
    turns = held_out_turns([group], scenarios=5, turns_per_scenario=2, seed=1).turns
    assert sorted(turn.call.prompt_token_ids or () for turn in turns) == [(1,), (1, 2)]
    assert len(held_out_turns([group], scenarios=5, turns_per_scenario=1, seed=1).turns) == 1
    assert held_out_turns([group], scenarios=0, turns_per_scenario=2, seed=1) == HeldOut((), {})


def run_of(user: str | None, scenario: str) -> Group:
    run = make_trajectory(f"run-{scenario}-{user}", user_id=user)
    return make_group(run, key=f"group-{scenario}", scenario=scenario)


def asked(groups: list[Group], **how: Any) -> tuple[list[str], dict[str, int]]:
    held_out = held_out_turns(groups, **{"scenarios": 64, "turns_per_scenario": 2, "seed": 1} | how)
    return [turn.scenario_key for turn in held_out.turns], dict(held_out.left)


def test_users_who_just_arrived_have_no_say():
    came = {"founder": 0.0, "early": 90.0, "known": 400.0, "fresh": 960.0}
    assert new_users(came, project_since=0.0, new_user_s=100.0, now=1000.0) == {"fresh"}
    assert new_users(came, project_since=0.0, new_user_s=0.0, now=1000.0) == frozenset()
    assert new_users({"a": 0.0, "b": 90.0}, project_since=0.0, new_user_s=100.0, now=95.0) == frozenset()
    groups = [run_of("known", "a"), run_of("fresh", "b"), run_of(None, "c")]
    assert asked(groups, without=frozenset({"fresh"})) == (["c", "a"], {"of users who just arrived": 1})
    shared = make_group(*run_of("fresh", "d").trajectories, *run_of("known", "d").trajectories, scenario="d")
    (turn,) = held_out_turns([shared], scenarios=9, turns_per_scenario=1, seed=1, without=frozenset({"fresh"})).turns
    assert turn.info is not None and turn.info.user_id == "known"


def test_a_scenario_speaks_for_one_user():
    theirs = [
        make_group(
            *(run_of(user, f"q{n}").trajectories[0] for user in ("ann", "bob", None)), key=f"g{n}", scenario=f"q{n}"
        )
        for n in range(4)
    ]
    held_out = held_out_turns(theirs, scenarios=9, turns_per_scenario=2, seed=1)
    assert held_out.user_of == {"q3": "ann", "q2": "bob", "q1": "ann", "q0": "bob"}
    assert all({info.user_id for info in held_out.runs[key]} == {user} for key, user in held_out.user_of.items())
    assert held_out_turns([run_of(None, "a")], scenarios=9, turns_per_scenario=2, seed=1).user_of == {"a": None}


def test_one_user_makes_up_no_more_than_a_share_of_what_is_asked():
    others = [run_of(f"u{n}", f"other{n}") for n in range(9)]
    flood = [run_of("loud", f"flood{n}") for n in range(200)]
    keys, left = asked([*others, *flood], max_user_share=0.25, scenarios=12)
    assert keys == ["flood199", "flood198", "flood197", *(f"other{n}" for n in reversed(range(9)))]
    assert left == {"a user's scenarios are more than their share": 197}
    assert asked(flood, max_user_share=0.25, scenarios=12)[1] == {}  # one known user is all there is
    nobody = [run_of(None, f"flood{n}") for n in range(20)]
    assert len(asked([*others, *nobody], max_user_share=0.1)[0]) == 29


def test_the_same_questions_have_the_same_hash_in_any_order():
    turns = held_out_turns([run_of("u", "a"), run_of("v", "b")], scenarios=9, turns_per_scenario=1, seed=1).turns
    assert data_hash(turns) == data_hash(turns[::-1]) != data_hash(turns[:1])
    renamed = [Turn(f"{turn.scenario_key}!", turn.call) for turn in turns]
    assert data_hash(renamed) != data_hash(turns)


def test_the_judge_is_not_told_who_answered():
    numbers = count()
    turn = Turn("task:x", make_call(policy="agent@3"))
    ours = [Choice(0, {"role": "assistant", "content": "new"}, "stop", (1,), (-0.1,))]
    theirs = [Choice(0, {"role": "assistant", "content": "old"}, "stop", (2,), (-0.2,))] * 2
    group, of_candidate = blind_answers(turn, ours, theirs, new_id=lambda: f"id{next(numbers)}")
    assert [t.calls[0].choices[0].message["content"] for t in group.trajectories if t.id in of_candidate] == ["new"]
    assert len(group.trajectories) == 3
    for trajectory in group.trajectories:
        assert trajectory.calls[0].policy is None
        assert trajectory.calls[0].choices[0].token_ids is None
        assert trajectory.calls[0].messages == turn.call.messages


@pytest.mark.parametrize(
    "wrong",
    [
        {"level": 1.0},
        {"level": math.nan},
        {"margin": math.nan},
        {"margin": 1.0},
        {"orders": 3},
        {"max_worse": -0.1},
        {"worst_share": 1.1},
        {"min_users": 0},
        {"max_scenarios": 29},
        {"max_user_share": math.nan},
        {"samples": 0},
    ],
)
def test_a_gate_that_would_promote_anything_or_nothing_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GateConfig(**wrong)
