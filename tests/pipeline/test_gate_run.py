"""Two policies before the gate: a real store; the engine answers by rule, and the judge scores by rule, in any order.

Both are stand-ins, so that what a policy says and what a judge prefers are known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.gate import GateConfig, Turn, Verdict, data_hash
from art_patch.pipeline.cycle_run import Cycle, CycleConfig
from art_patch.pipeline.gate_run import run_gate
from art_patch.rewards.checks import make_check
from art_patch.settings import Redact
from art_patch.store import Store, open_store
from art_patch.types import Call, Policy, Trajectory
from tests.support.ruled_gate import (
    CANDIDATE,
    CHAMPION,
    COUNT,
    RuledEngine,
    RuledJudge,
    Says,
    failed,
    rates,
    says,
    traffic,
)


def decided(
    store: Store, *, says: Says = says, judge: RuledJudge | None = None, candidate: Policy = CANDIDATE,
    now: float = 9.0, checks: Sequence[Callable[[Trajectory], Any]] = (), gate_judge: RuledJudge | None = None,
    redact: Redact = None, **gate: Any,
) -> tuple[Verdict, dict[str, Any]]:  # fmt: skip
    small = GateConfig(**{"min_scenarios": 8} | gate)
    config = CycleConfig(gate=small, checks=tuple(make_check(check) for check in checks), redact=redact)
    run = Cycle(
        store, judge or RuledJudge(rates), config, lambda *_: None, now, RuledEngine(says), Path("/none"), "test",  # type: ignore[arg-type]
        gate_judge=gate_judge,
    )  # fmt: skip
    verdict = run_gate(run, candidate, CHAMPION)
    assert json.loads(json.dumps(verdict.metrics, allow_nan=False)) == verdict.metrics == run.metrics["gate"]
    return verdict, dict(verdict.metrics)


def suite(*names: str) -> tuple[Turn, ...]:
    calls = (Call(f"suite:{n}", f"suite:{n}", 0.0, "suite", ({"role": "user", "content": n},)) for n in names)
    return tuple(Turn(call.id, call) for call in calls)


def test_the_better_one_wins_and_the_metrics_say_who_judged_what(store: Store):
    judge = RuledJudge(rates)
    verdict, metrics = decided(store, judge=judge)
    assert verdict.promote, verdict
    assert (metrics["scenarios"], metrics["turns"], metrics["difference"]) == (COUNT, COUNT, pytest.approx(0.3))
    assert (metrics["judge"], metrics["rubric"], metrics["judge_calls"]) == ("ruled", "r1", 2 * COUNT)
    assert judge.asked == [("shuffled", "gate")] * COUNT + [("reversed", "gate")] * COUNT
    assert metrics["order_disagreement"] == 0
    assert metrics["config"]["orders"] == 2
    assert failed(metrics) == []
    groups = store.read.groups(state="formed", held_out=True)
    assert metrics["data_sha256"] == data_hash([Turn(g.scenario_key, g.trajectories[0].calls[0]) for g in groups])
    assert len(decided(store, judge=(once := RuledJudge(rates)), orders=1)[1]) and len(once.asked) == COUNT


def test_a_judge_that_likes_what_stands_first_promotes_nobody(store: Store):
    first = RuledJudge(lambda _, place: 1.0 - place / 8)
    verdict, metrics = decided(store, judge=first)
    assert not verdict.promote and verdict.reason.startswith("a tie")
    assert metrics["difference"] == pytest.approx(0.0)
    assert metrics["order_disagreement"] > 0.5


@pytest.mark.parametrize("skipped", ["shuffled", "reversed"])
def test_what_was_not_judged_in_both_orders_rejects(store: Store, skipped: str):
    judge = RuledJudge(rates, skips=lambda group, order: order == skipped and group.scenario_key <= "task:q1")
    verdict, metrics = decided(store, judge=judge)
    assert (verdict.promote, metrics["unscored"], failed(metrics)) == (False, 2, ["unscored"])
    assert "it wins, but the judge scored only 8 of 10 turns" in verdict.reason


def test_a_winner_that_says_the_same_to_everybody_is_rejected(store: Store):
    def canned(policy: str, question: str, number: int) -> str:
        return "good for you" if policy == "agent@1" else f"fair {number} {question}"

    verdict, metrics = decided(store, says=canned)
    assert not verdict.promote
    assert failed(metrics) == ["same answers"]
    assert "it wins, but same answers 1 against 0; at most 0.5 is allowed" in verdict.reason
    moved = replace(CANDIDATE, metrics={"train": {"kl_nats": 5.0}})
    assert failed(decided(store, candidate=moved)[1]) == ["kl_nats"]


def test_a_suite_is_asked_whatever_traffic_brings_and_may_not_get_worse(store: Store):
    def forgets(policy: str, question: str, number: int) -> str:
        return f"bad {number}" if (policy, question) == ("agent@1", "refund") else says(policy, question, number)

    def strict(answer: str, place: int) -> float:
        return 0.0 if answer.startswith("bad") else rates(answer, place)

    verdict, metrics = decided(store, says=forgets, judge=RuledJudge(strict), suite=suite("refund"))
    assert (verdict.promote, failed(metrics)) == (False, ["suite"])
    assert (metrics["scenarios"], metrics["turns"], metrics["suite"]) == (COUNT, COUNT + 1, 1)
    assert decided(store, suite=suite("refund", "order"))[0].promote
    silent = RuledJudge(rates, skips=lambda group, order: group.scenario_key == "suite:refund")
    verdict, metrics = decided(store, judge=silent, suite=suite("refund"))
    assert failed(metrics) == ["suite"] and "1 of 1 prompts have no score" in verdict.reason


def polite(run: Trajectory) -> float:
    assert run.info.metadata["n"] >= 0  # what the user said of the run is there
    return float("fair" in run.calls[0].choices[0].message["content"])


def broken(run: Trajectory) -> float:
    raise KeyError(run.id)


def one_sided(run: Trajectory) -> float | None:
    return None if "good" in run.calls[0].choices[0].message["content"] else 1.0


def silent(run: Trajectory) -> float | None:
    return None


def test_a_users_own_checks_may_not_get_worse_and_must_be_able_to_say(store: Store):
    verdict, metrics = decided(store, checks=[polite, silent])
    assert failed(metrics) == ["check polite"]
    words = "check polite 0 against 1: worse by at most 1, which errs at most once in twenty times; 0.1 is allowed"
    assert words in verdict.reason
    verdict, metrics = decided(store, checks=[broken])
    assert failed(metrics) == ["broken", "broken"]
    assert "check broken: raised KeyError, on 40 of 40 answers of the candidate; mend the check" in verdict.reason
    verdict, metrics = decided(store, checks=[one_sided])
    assert "check one_sided speaks of one policy's answers alone on 10 of 10 turns" in verdict.reason


def test_the_gates_own_judge_decides_and_both_gains_are_shown(store: Store):
    def strict(answer: str, place: int) -> float:
        return 1 - rates(answer, place)

    trains, decides = RuledJudge(rates), RuledJudge(strict)
    verdict, metrics = decided(store, judge=trains, gate_judge=decides)
    assert (verdict.promote, len(trains.asked), len(decides.asked)) == (False, 2 * COUNT, 2 * COUNT)
    assert (metrics["difference"], metrics["judge_calls"]) == (pytest.approx(-0.3), 4 * COUNT)
    assert [(one["name"], one["mean"], one["count"]) for one in metrics["gains"]] == [
        ("the training judge", pytest.approx(0.3), COUNT),
        ("the gate's judge", pytest.approx(-0.3), COUNT),
    ]
    assert verdict.reason.endswith(
        "gains: the training judge +0.300 (+0.300 to +0.300, 10 scenarios), the gate's judge -0.300 (-0.300 to -0.300, "
        "10 scenarios); the training judge and the gate's judge disagree: the policy may please the judge alone"
    )
    # Its scores decide nothing, so the gate does without them.
    silent = RuledJudge(rates, skips=lambda group, order: True)
    verdict, metrics = decided(store, judge=silent, gate_judge=RuledJudge(rates))
    assert (verdict.promote, [one["name"] for one in metrics["gains"]]) == (True, ["the gate's judge"])


def test_a_check_that_falls_while_the_judge_rises_is_named(store: Store):
    verdict, metrics = decided(store, checks=[polite], max_worse=1.0)
    assert verdict.promote
    assert [one["name"] for one in metrics["gains"]] == ["the judge", "check polite"]
    assert "the judge and check polite disagree: the policy may please the judge alone" in verdict.reason


def test_users_who_just_arrived_do_not_steer_it_and_it_says_so(store: Store):
    for n in range(5):
        traffic(store, 100 + n, user="ann", at=1.0)
        traffic(store, 200 + n, user="eve", at=500_000.0)
    verdict, metrics = decided(store, now=500_001.0, min_scenarios=18)
    assert (metrics["scenarios"], metrics["left"]) == (COUNT + 5, {"of users who just arrived": 5})
    assert not verdict.promote
    assert "3 more are needed" in verdict.reason
    assert verdict.reason.endswith("(held out but not asked: 5 of users who just arrived)")
    assert decided(store, now=500_001.0, min_scenarios=18, new_user_s=0.0)[0].promote


@pytest.fixture
def ledger(store: Store) -> Store:
    """The policies are in the ledger, as they are in a cycle."""
    store.ledger.add_base("agent@0", "base", "0" * 64, who="test")
    store.ledger.add_candidate(CANDIDATE, trained_on=[], who="test")
    return store


def test_both_answers_to_each_held_out_turn_are_kept_with_their_scores(ledger: Store):
    def secret(policy: str, question: str, number: int) -> str:
        key = "sk-proj-" + "a1B2" * 12
        return f"good, the key is {key}" if (policy, question) == ("agent@1", "q0") else says(policy, question, number)

    _, metrics = decided(ledger, suite=suite("refund"))
    assert metrics["against"] == "agent@0"
    groups = [each["group"] for each in metrics["results"]]
    found = ledger.gate_answers.of("agent@1", "agent@0", groups)
    assert sorted(found) == sorted(groups)  # and not the suite, which no run belongs to
    for turn in (turn for turns in found.values() for turn in turns):
        (run,) = ledger.read.trajectories([turn.trajectory_id])
        question = run.calls[0].messages[-1]["content"]
        assert turn.call_id == run.calls[0].id
        for side, name, score in ((turn.candidate, "agent@1", 0.8), (turn.champion, "agent@0", 0.5)):
            assert side == tuple(
                {
                    "message": {"role": "assistant", "content": says(name, question, number)},
                    "finish_reason": "stop",
                    "score": pytest.approx(score),
                }
                for number in range(4)
            )
    # A second gate of both replaces them; texts are redacted where the job is set to.
    skips = RuledJudge(rates, skips=lambda group, order: group.scenario_key == "task:q1")
    decided(ledger, says=secret, judge=skips, redact="secrets")
    found = ledger.gate_answers.of("agent@1", "agent@0", groups)
    assert sum(map(len, found.values())) == COUNT
    texts = [str(each["message"]["content"]) for turns in found.values() for each in turns[0].candidate]
    assert sum("the key is" in text for text in texts) == 4
    assert not any("sk-proj" in text for text in texts)
    assert [turns[0].candidate[0]["score"] for turns in found.values()].count(None) == 1
    assert ledger.verify() == []


def test_an_erasure_while_a_gate_runs_leaves_no_answers_of_it(ledger: Store):
    def erases(policy: str, question: str, number: int) -> str:
        if (policy, question, number) == ("agent@1", "q3", 0):
            ledger.rights.erase(user="u", who="test")
        return says(policy, question, number)

    traffic(ledger, 50, user="u")
    _, metrics = decided(ledger, says=erases)
    found = ledger.gate_answers.of("agent@1", "agent@0", [each["group"] for each in metrics["results"]])
    assert (len(metrics["results"]), len(found)) == (COUNT + 1, COUNT)
    assert ledger.verify() == []


def test_what_outlives_an_erasure_names_scenarios_by_their_groups(store: Store):
    def spoils(policy: str, question: str, number: int) -> str:
        return f"bad {number}" if (policy, question) == ("agent@1", "q7") else says(policy, question, number)

    def strict(answer: str, place: int) -> float:
        return 0.0 if answer.startswith("bad") else rates(answer, place)

    verdict, metrics = decided(store, says=spoils, judge=RuledJudge(strict), worst_share=0.1)
    (group,) = (each for each in store.read.groups(state="formed", held_out=True) if each.scenario_key == "task:q7")
    assert metrics["ruined"] == [group.id]
    assert f"it ruins some: -0.500 in its worst 1 scenarios ({group.id})" in verdict.reason
    assert "q7" not in json.dumps(metrics) + verdict.reason


def test_without_scenarios_it_rejects(tmp_path: Path):
    empty = open_store(f"sqlite:///{tmp_path}/empty.db")
    verdict, metrics = decided(empty)
    assert (verdict.promote, metrics["turns"], metrics["judge"]) == (False, 0, None)
    assert "8 more are needed" in verdict.reason
    empty.close()
