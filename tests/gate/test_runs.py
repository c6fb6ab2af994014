"""Whole runs of two policies, as the gate looks at them."""

from __future__ import annotations

from dataclasses import replace

from art_patch.gate import (
    GateConfig,
    Repeated,
    Turn,
    answered_in,
    blind_runs,
    collapse_findings,
    failed_runs,
    speaks_of,
)
from art_patch.types import Trajectory
from tests.support.factory import make_call, make_trajectory

TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("look", "sell"))


def run(key: str, policy: str, *texts: str, error: str | None = None) -> Trajectory:
    calls = (
        make_call(f"{key}{n}", trajectory_id=key, text=text, policy=policy, tools=TOOLS[n : n + 1], duration_ms=10.0)
        for n, text in enumerate(texts)
    )
    return make_trajectory(key, *calls, user_id="u", error=error)


ONE = Repeated(
    Turn("s", make_call()),
    (run("a", "agent@1", "x", "y"), run("b", "agent@1", "z", error="ValueError: no")),
    (run("c", "agent@0", "v"), run("d", "agent@0", "w")),
)


def test_a_run_speaks_of_a_policy_that_alone_answered_it():
    theirs = run("r", "agent@1", "x")
    upstream = make_call("u", trajectory_id="r", policy=None)
    assert speaks_of(theirs, "agent@1")
    assert not speaks_of(theirs, "agent@0")
    # With tools of the provider's, say: no policy would have been asked.
    assert speaks_of(replace(theirs, calls=(*theirs.calls, upstream)), "agent@1")
    fell_back = replace(upstream, fallback="the engine was too slow")
    assert not speaks_of(replace(theirs, calls=(*theirs.calls, fell_back)), "agent@1")
    assert not speaks_of(replace(theirs, calls=(upstream,)), "agent@1")
    assert not speaks_of(replace(theirs, calls=(replace(theirs.calls[0], choices=()),)), "agent@1")
    assert not speaks_of(replace(theirs, calls=()), "agent@1")


def test_the_judges_group_tells_nothing_of_who_ran_it():
    turn, group, ours = blind_runs(ONE, new_id=lambda: "g")
    assert (turn, group.id, group.scenario_key, group.held_out) == (ONE.turn, "g", "s", True)
    assert (ours, [each.id for each in group.trajectories]) == ({"a", "b"}, ["a", "b", "c", "d"])
    for blind, seen in zip(group.trajectories, ONE.runs, strict=True):
        assert (blind.info.user_id, blind.info.error, blind.info.started_at) == (None, None, 0.0)
        assert [call.messages for call in blind.calls] == [call.messages for call in seen.calls]
        assert [call.choices[0].message for call in blind.calls] == [call.choices[0].message for call in seen.calls]
        assert {(call.policy, call.choices[0].token_ids, call.duration_ms) for call in blind.calls} == {
            (None, None, 0.0)
        }


def test_what_was_said_in_runs_is_looked_at_as_answers_to_one_turn():
    answered = answered_in(ONE)
    assert [choice.message["content"] for choice in answered.candidate.choices] == ["x", "y", "z"]
    assert [choice.message["content"] for choice in answered.champion.choices] == ["v", "w"]
    assert (answered.candidate.duration_ms, answered.champion.duration_ms) == (15.0, 10.0)  # a run
    assert answered.turn.call.tools == TOOLS
    assert all(row.passed for row in collapse_findings([answered], GateConfig()))
    silent = replace(ONE, candidate=(run("a", "agent@1", ""), run("b", "agent@1", "")))
    (row,) = [row for row in collapse_findings([answered_in(silent)], GateConfig()) if not row.passed]
    assert (row.name, row.candidate, row.champion) == ("empty answers", 1.0, 0.0)


def test_a_candidate_whose_runs_fail_more_often_is_told():
    assert failed_runs([], GateConfig()) == ()
    (finding,) = failed_runs([ONE], GateConfig())
    assert (finding.name, finding.candidate, finding.champion, finding.passed) == ("failed runs", 0.5, 0.0, False)
    assert failed_runs([ONE], GateConfig(max_worse=0.5))[0].passed
    turned = replace(ONE, candidate=ONE.champion, champion=ONE.candidate)
    assert failed_runs([turned], GateConfig())[0].passed
