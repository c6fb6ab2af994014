"""Where upstream is the champion: what learns beside it, when it may be tested, and how it comes to serve.

A real store; the engine answers by rule, and the judge scores by rule. Both are stand-ins, so that what a policy says
and what a judge prefers are known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.errors import EngineError
from art_patch.gate import GateConfig, Verdict
from art_patch.pipeline import CycleConfig, control_once, retrain, watch_once
from art_patch.pipeline.against_upstream import KEY, compare_learner, standing, what_is_missing
from art_patch.pipeline.cycle_run import Cycle, CycleReport, why_none_serves
from art_patch.promotion import CanaryConfig, rollback
from art_patch.store import Store, open_store
from art_patch.types import Call, Choice, Group, Policy, Score, Trajectory, TrajectoryInfo
from tests.support.ruled_gate import RuledEngine, RuledJudge

LEARNER = "agent@0"
HOUR = 3_600.0
CONFIG = CycleConfig(
    gate=GateConfig(min_scenarios=8, max_scenarios=16, worst_share=0), canary=CanaryConfig(min_sessions=10)
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The base learns, since upstream's answers are on record."""
    opened = open_store(f"sqlite:///{tmp_path}/store.db")
    opened.ledger.add_base(LEARNER, "/base", "ff", who="test", upstream_answers=True, now=0.0)
    yield opened
    assert opened.verify() == []
    opened.close()


def held_out(
    store: Store, count: int, *, policy: str | None = None, said: str = "fair", first: int = 0, at: float = 1.0
) -> None:
    """Held-out scenarios of one run each."""
    for n in range(first, first + count):
        key = new_id()
        only = Choice(0, {"role": "assistant", "content": f"{said} answer to q{n}"}, "stop")
        prompt = ({"role": "user", "content": f"q{n}"},)
        call = Call(new_id(), key, at, "m", prompt, (only,), policy=policy, untrainable="answered by upstream")
        info = TrajectoryInfo(key, at, "explicit")
        store.write([info, call])
        group = Group(new_id(), f"task:q{n}", "single", (Trajectory(info, (call,)),), held_out=True)
        store.ledger.add_groups([group])


def rates(answer: str, _: int) -> float:
    return 0.8 if answer.startswith("good") else 0.5 if answer.startswith("fair") else 0.1


def compared(store: Store, says: str, config: CycleConfig = CONFIG, *, is_final: bool = False) -> CycleReport | None:
    """The report after a comparison; the learner begins all its answers like this."""
    engine = RuledEngine(lambda policy, question, number: f"{says} answer {number} to {question}")
    run = Cycle(store, RuledJudge(rates), config, lambda *_: None, 9.0, engine, Path("/none"), "test")  # type: ignore[arg-type]
    learner = store.ledger.learner()
    assert learner is not None
    return compare_learner(run, learner, is_final=is_final)


def test_a_learner_that_is_as_good_as_upstream_is_tested_beside_it(store: Store):
    held_out(store, 12)
    report = compared(store, "good")
    assert report is not None
    assert (report.outcome, report.champion, report.candidate) == ("canary", None, LEARNER)
    assert "on 12 held-out scenarios" in report.reason
    assert "proven not worse by more than 0.05" in report.reason
    route = store.ledger.route()
    assert (route.champion, route.learner, route.challenger, route.challenger_percent) == (None, None, LEARNER, 5.0)
    policy = store.ledger.policy(LEARNER)
    assert policy is not None
    assert (policy.metrics[KEY]["passed"], policy.metrics[KEY]["at"]) == (True, 9.0)
    assert report.metrics[KEY]["turns"] == 12
    assert policy.metrics[KEY]["against"] == "upstream"
    kept = store.gate_answers.of(LEARNER, "upstream", [each["group"] for each in policy.metrics[KEY]["results"]])
    assert len(kept) == 12
    for (turn,) in kept.values():
        assert (len(turn.candidate), len(turn.champion)) == (4, 1)
        assert str(turn.champion[0]["message"]["content"]).startswith("fair answer to q")


def test_one_that_is_worse_learns_on_and_is_not_compared_again(store: Store):
    held_out(store, 12)
    report = compared(store, "bad")
    assert report is not None
    assert (report.outcome, report.champion) == ("learns", None)
    assert "upstream answers; against upstream, it scores 0.100 against 0.500" in report.reason
    assert "far below: `art-patch retrain --imitate-from 0.8` first imitates upstream's answers" in report.reason
    assert "12 answers are on record" in report.reason
    assert store.ledger.route().learner == LEARNER
    held_out(store, 12, first=12)
    assert compared(store, "good") is None


def test_too_few_prompts_of_upstream_are_no_comparison(store: Store):
    held_out(store, 7)
    held_out(store, 12, policy=LEARNER, first=20)  # what a policy answered says nothing about upstream
    assert compared(store, "good") is None
    learner = store.ledger.learner()
    assert learner is not None
    assert KEY not in learner.metrics


def test_an_undecided_one_is_compared_again_once_as_many_prompts_are_there_as_were_lacking(store: Store):
    # Two questions in three better than upstream, one worse: not proven on few.
    words = {f"q{n}": "bad" if n % 3 == 2 else "good" for n in range(200)}
    engine = RuledEngine(lambda policy, question, number: f"{words.get(question)} answer {number}")
    run = Cycle(store, RuledJudge(rates), CONFIG, lambda *_: None, 9.0, engine, Path("/none"), "test")  # type: ignore[arg-type]
    held_out(store, 9)
    first = compare_learner(run, store.ledger.learner())  # type: ignore[arg-type]
    assert first is not None
    assert first.outcome == "learns", first.reason
    more = first.metrics[KEY]["more_needed"]
    assert more > 1
    held_out(store, more - 1, first=9)
    assert compare_learner(run, store.ledger.learner()) is None  # type: ignore[arg-type]
    held_out(store, 1, first=8 + more)
    second = compare_learner(run, store.ledger.learner())  # type: ignore[arg-type]
    assert second is not None
    assert second.metrics[KEY]["scenarios"] == 9 + more


@pytest.mark.parametrize(("upstreams", "state"), [(0.5, "canary"), (0.9, "rejected")])
def test_a_candidate_that_only_seems_better_than_the_learner_is_measured_by_upstream(
    store: Store, tmp_path: Path, upstreams: float, state: str
):
    """The learner answers nobody, and near the ceiling no candidate can be proven better than it."""
    held_out(store, 20)
    candidate = Policy("agent@1", "/base", "ff", "candidate", 2.0, path=str(tmp_path), parent=LEARNER)
    store.ledger.add_candidate(candidate, trained_on=[], who="test")

    class Ruled(RuledEngine):
        def unload(self, name: str) -> None:
            assert name == "agent@1"

    def says(policy: str, question: str, number: int) -> str:
        # They differ on one question, which proves nothing.
        return f"{'bad' if (policy, question) == (LEARNER, 'q19') else 'good'} answer {number} to {question}"

    def judged(answer: str, _: int) -> float:
        return {"good": 0.8, "bad": 0.1}.get(answer.split()[0], upstreams)

    engine: Any = Ruled(says)
    judge = RuledJudge(judged)
    report = retrain(
        store, engine, judge, tmp_path / "adapters", CONFIG, who="test", progress=lambda *_, **__: None, now=9.0
    )
    assert (report.outcome, report.candidate) == (state, "agent@1"), report.reason
    assert "not proven better" in report.reason
    assert "against upstream, it scores 0.800" in report.reason
    states = {each.name: each.state for each in store.ledger.policies()}
    assert states == {LEARNER: "retired" if state == "canary" else "learner", "agent@1": state}
    kept = store.ledger.policy("agent@1")
    assert kept is not None
    assert kept.metrics["gate"]["difference"] > 0
    assert kept.metrics[KEY]["passed"] == (state == "canary")


# --- a learner that still gains ---


def gained(store: Store, by: float) -> None:
    """The learner's last update made it better by this much."""
    store.ledger.keep_metrics(LEARNER, metrics={"gate": {"difference": by}})


def test_a_learner_that_is_only_as_good_and_still_gains_is_trained_once_more_before_its_canary(store: Store):
    held_out(store, 12)
    gained(store, 0.09)
    report = compared(store, "fair")
    assert report is not None
    assert (report.outcome, store.ledger.route().learner) == ("learns", LEARNER), report.reason
    waits = "its last update gained 0.090, so another one comes before its test on the app's sessions"
    assert report.reason.endswith(waits)
    told = standing(store, min_scenarios=8)
    assert told is not None
    assert (told["passed"], told["gained"]) == (True, 0.09)
    assert waits in what_is_missing(told)
    # Until an update has been tried; then the comparison that it passed is enough.
    assert compared(store, "bad") is None
    later = compared(store, "bad", is_final=True)
    assert later is not None
    assert (later.outcome, store.ledger.route().challenger) == ("canary", LEARNER)
    # What it waited for is over.
    store.ledger.end_test(LEARNER, who="me", reason="complaints")
    told = standing(store, min_scenarios=8)
    assert told is not None
    assert "not proven on the app's sessions" in what_is_missing(told)


def test_a_learner_does_not_wait_for_training_that_is_broken(store: Store):
    held_out(store, 12)
    gained(store, 0.09)
    assert (first := compared(store, "fair")) is not None
    assert first.outcome == "learns"
    assert compared(store, "bad") is None  # a cycle begins, and ends with an error before any gate
    report = compared(store, "bad")
    assert report is not None
    assert report.outcome == "canary"


def test_a_learner_that_waited_for_a_better_one_is_told_once_a_person_decides(store: Store):
    held_out(store, 12)
    gained(store, 0.09)
    assert compared(store, "fair") is not None
    approving = replace(CONFIG, promotion="approve")
    report = compared(store, "bad", approving)
    assert report is not None
    assert (report.outcome, report.candidate) == ("waits for approval", LEARNER)
    assert compared(store, "bad", approving) is None


def test_a_comparison_under_a_larger_limit_is_made_again(store: Store):
    held_out(store, 12)
    gained(store, 0.09)
    assert compared(store, "fair") is not None
    strict = replace(CONFIG, canary=replace(CONFIG.canary, max_loss=0.0))
    report = compared(store, "fair", strict, is_final=True)
    assert report is not None
    assert (report.outcome, store.ledger.route().challenger) == ("learns", None), report.reason


def test_a_test_on_sessions_has_spoken_for_good(store: Store):
    held_out(store, 12)
    assert (first := compared(store, "fair")) is not None
    assert first.outcome == "canary"
    store.ledger.end_test(LEARNER, who="me", reason="complaints")
    for step in range(1, 103):
        candidate = Policy(f"agent@{step}", "/base", "ff", "candidate", 2.0, path="/none", parent=LEARNER)
        store.ledger.add_candidate(candidate, trained_on=[], who="test")
        store.ledger.move(candidate.name, "rejected", who="test", reason="worse")
    assert compared(store, "fair") is None


def test_a_rejection_stands_though_the_learner_cannot_be_compared(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held_out(store, 12)
    gained(store, 0.09)

    def fails(*_: Any) -> CycleReport:
        raise EngineError("it is starting")

    with monkeypatch.context() as patched:
        patched.setattr("art_patch.pipeline.promote_policy.begin_canary", fails)
        report = cycle_with_candidate(store, tmp_path, "bad")
    assert (report.outcome, report.candidate) == ("rejected", "agent@1")
    assert "the learner was not compared with upstream: it is starting" in report.reason


@pytest.mark.parametrize(
    ("says", "by", "is_final"), [("fair", 0.04, False), ("good", 0.09, False), ("fair", 0.09, True)]
)
def test_no_update_is_waited_for_where_it_gained_little_or_the_learner_is_proven_better(
    store: Store, says: str, by: float, is_final: bool
):
    held_out(store, 12)
    gained(store, by)
    report = compared(store, says, is_final=is_final)
    assert report is not None
    assert report.outcome == "canary", report.reason


def test_a_person_is_not_kept_from_deciding_on_a_learner_that_still_gains(store: Store):
    held_out(store, 12)
    gained(store, 0.09)
    report = compared(store, "fair", replace(CONFIG, promotion="approve"))
    assert report is not None
    assert report.outcome == "waits for approval"


class Unloads(RuledEngine):
    """Forgets policies, too."""

    def unload(self, name: str) -> None:
        assert name != LEARNER


def cycle_with_candidate(store: Store, tmp_path: Path, says: str, *, step: int = 1) -> CycleReport:
    """A cycle that gates a candidate; the learner answers fairly, as upstream does, and the candidate like this."""
    learner = store.ledger.learner()
    assert learner is not None
    name = f"agent@{step}"
    candidate = Policy(name, "/base", "ff", "candidate", 2.0, path=str(tmp_path), parent=learner.name)
    store.ledger.add_candidate(candidate, trained_on=[], who="test")
    engine: Any = Unloads(
        lambda policy, question, number: f"{says if policy == name else 'fair'} answer {number} to {question}"
    )
    return retrain(
        store,
        engine,
        RuledJudge(rates),
        tmp_path / "adapters",
        CONFIG,
        who="test",
        progress=lambda *_, **__: None,
        now=9.0,
    )


def test_a_cycle_whose_candidate_is_rejected_tests_the_learner_that_waited_for_a_better_one(
    store: Store, tmp_path: Path
):
    held_out(store, 12)
    gained(store, 0.09)
    assert (first := compared(store, "fair")) is not None
    assert first.outcome == "learns"
    report = cycle_with_candidate(store, tmp_path, "bad")
    assert (report.outcome, report.candidate) == ("canary", LEARNER), report.reason
    assert report.reason.startswith("agent@1 is rejected: ")
    assert "not proven better" in report.reason
    assert f"; {LEARNER}: against upstream, it scores 0.500 against 0.500" in report.reason
    assert {each.name: each.state for each in store.ledger.policies()} == {LEARNER: "canary", "agent@1": "rejected"}


def test_a_cycle_whose_candidate_is_rejected_compares_the_learner_for_the_first_time(store: Store, tmp_path: Path):
    held_out(store, 12)
    gained(store, 0.09)
    report = cycle_with_candidate(store, tmp_path, "bad")
    assert (report.outcome, report.candidate) == ("canary", LEARNER), report.reason


def test_a_cycle_whose_candidate_gained_much_says_that_another_update_comes(store: Store, tmp_path: Path):
    held_out(store, 12, said="good")
    report = cycle_with_candidate(store, tmp_path, "good")
    assert (report.outcome, report.candidate) == ("learns", "agent@1"), report.reason
    assert "proven better" in report.reason
    assert report.reason.endswith("gained 0.300, so another one comes before its test on the app's sessions")
    assert store.ledger.route().learner == "agent@1"


def test_a_cycle_that_has_nothing_to_train_on_tests_the_learner_that_waited(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("art_patch.pipeline.cycle.check_can_train", lambda *_: None)  # there is no base
    held_out(store, 12)
    gained(store, 0.09)
    engine: Any = Unloads(lambda policy, question, number: f"fair answer {number} to {question}")
    report = retrain(
        store, engine, RuledJudge(rates), tmp_path / "adapters", CONFIG, who="test",
        progress=lambda *_, **__: None, now=9.0,
    )  # fmt: skip
    assert (report.outcome, report.candidate) == ("canary", LEARNER), report.reason


def test_the_standing_counts_scenarios_and_not_the_runs_of_one(store: Store):
    held_out(store, 12)
    held_out(store, 12)
    told = standing(store, min_scenarios=20)
    assert told is not None
    assert told["scenarios"] == 12
    assert "12 of 20" in what_is_missing(told)
    # A comparison counts them so, too.
    assert (
        compared(store, "good", replace(CONFIG, gate=replace(CONFIG.gate, min_scenarios=20, max_scenarios=24))) is None
    )


def test_a_candidate_whose_canary_could_not_begin_is_compared_again(store: Store, monkeypatch: pytest.MonkeyPatch):
    held_out(store, 12)
    candidate = Policy("agent@1", "/base", "ff", "candidate", 2.0, path="/none", parent=LEARNER)
    store.ledger.add_candidate(candidate, trained_on=[], who="test")
    engine = RuledEngine(lambda policy, question, number: f"good answer {number} to {question}")
    run = Cycle(store, RuledJudge(rates), CONFIG, lambda *_: None, 9.0, engine, Path("/none"), "test")  # type: ignore[arg-type]

    def fails(*_: Any) -> CycleReport:
        raise EngineError("it is starting")

    with monkeypatch.context() as patched, pytest.raises(EngineError):
        patched.setattr("art_patch.pipeline.promote_policy.begin_canary", fails)
        compare_learner(run, candidate, gated=Verdict(False, "not proven better", {"difference": 0.1}))
    assert store.ledger.route().learner == "agent@1"
    report = compared(store, "good")
    assert report is not None
    assert (report.outcome, report.candidate) == ("canary", "agent@1")


def test_a_person_may_decide(store: Store):
    held_out(store, 12)
    report = compared(store, "good", replace(CONFIG, promotion="approve"))
    assert report is not None
    assert report.outcome == "waits for approval"
    # Not `promote agent@0`, which would let it answer every session, without a control group.
    assert report.reason.endswith("`art-patch promote agent@0 --canary 5` tests it on 5 % of the sessions")
    assert store.ledger.route().learner == LEARNER


def test_a_learner_that_waited_for_a_person_is_tested_once_none_is_asked(store: Store):
    held_out(store, 12)
    assert compared(store, "good", replace(CONFIG, promotion="approve")) is not None
    assert compared(store, "good", replace(CONFIG, promotion="approve")) is None
    report = compared(store, "good")
    assert report is not None
    assert (report.outcome, store.ledger.route().challenger) == ("canary", LEARNER)
    store.ledger.end_test(LEARNER, who="me", reason="complaints")
    assert compared(store, "good") is None


# --- the canary beside upstream, and what comes after ---


def sessions(
    store: Store, *, since: float, hours: float, right: float, kept: float, theirs: float = 0.8, model: str = "m-1"
) -> None:
    """Sessions of one call; upstream has `kept` of them, and a model of it answers."""
    rng, records = random.Random(1), list[Any]()
    count = int(hours * 60)
    for number in range(count):
        at, run, is_kept = since + 60 + number * 60.0, new_id(), rng.random() < kept
        only = Choice(0, {"role": "assistant", "content": "three plums"}, "stop")
        records += [
            TrajectoryInfo(run, at, session_id=f"visit {run}"),
            Call(
                id=new_id(), trajectory_id=run, started_at=at, requested_model="m", choices=(only,),
                messages=({"role": "user", "content": "how many?"},), policy=None if is_kept else LEARNER,
                duration_ms=100.0, completion_tokens=4, in_control_group=is_kept,
                answered_by=model if is_kept else None,
            ),
            Score(new_id(), run, "reward", float(rng.random() < (theirs if is_kept else right)), "user", at + 5),
        ]  # fmt: skip
    store.write(records)


class Engine:
    """Serves everything, and unloads nothing."""

    def models(self) -> list[str]:
        return [LEARNER, "agent@1"]

    def unload(self, name: str) -> None:
        raise AssertionError(name)

    def chat(self, **body: Any) -> dict[str, Any]:
        return {"model": body["model"], "choices": [{"logprobs": {"content": [{"logprob": -0.5}]}}]}


def canary(store: Store, right: float, *, hours: float = 30.0, percent: float = 50.0) -> Any:
    store.ledger.move(LEARNER, "canary", who="test", reason="as good", percent=percent, now=1_000.0)
    sessions(store, since=1_000.0, hours=hours, right=right, kept=1 - percent / 100)
    engine: Any = Engine()
    return watch_once(store, engine, CONFIG.canary, who="watcher", now=1_000.0 + (hours + 1) * HOUR)


def test_a_canary_that_is_better_than_upstream_serves_and_the_control_group_begins(store: Store):
    report = canary(store, 0.99)
    assert (report.outcome, report.champion) == ("promoted", None), report.reason
    route = store.ledger.route()
    assert (route.champion, route.challenger, route.control_percent) == (LEARNER, None, 5.0)
    # Both sides are measured on the sessions that were assigned to them.
    assert report.metrics["champion"]["sessions"] + report.metrics["challenger"]["sessions"] == 1_800


def test_a_canary_is_not_compared_with_a_model_that_upstream_no_longer_has(store: Store):
    store.ledger.move(LEARNER, "canary", who="test", reason="as good", percent=50, now=1_000.0)
    sessions(store, since=1_000.0, hours=30, right=0.7, kept=0.5, theirs=0.4)
    # The later model is better than the canary.
    sessions(store, since=1_000.0 + 31 * HOUR, hours=10, right=0.7, kept=0.5, theirs=0.95, model="m-2")
    engine: Any = Engine()
    report = watch_once(store, engine, CONFIG.canary, who="watcher", now=1_000.0 + 42 * HOUR)
    assert report.outcome == "learns", report.reason
    assert report.metrics["champion"]["sessions"] + report.metrics["challenger"]["sessions"] < 700


def test_a_comparison_is_made_again_with_prompts_that_upstreams_later_model_answered(store: Store):
    held_out(store, 12)
    assert (first := compared(store, "bad")) is not None
    assert first.outcome == "learns"
    run = new_id()
    for at, model in ((8.0, "m-1"), (20.0, "m-2")):
        only = Choice(0, {"role": "assistant", "content": "fair"}, "stop")
        asked = ({"role": "user", "content": "x"},)
        store.write([TrajectoryInfo(run, at), Call(new_id(), run, at, "m", asked, (only,), answered_by=model)])
    # What the earlier model answered is no measure any more.
    assert compared(store, "good") is None
    held_out(store, 12, first=20, at=21.0)
    assert (second := compared(store, "good")) is not None
    assert (second.outcome, second.metrics[KEY]["scenarios"]) == ("canary", 12)


def test_a_move_is_dated_when_it_is_made_and_not_when_the_look_began(store: Store):
    """Apps follow it from then on: who answered before was chosen by the shares before."""

    class Slow(Engine):
        def chat(self, **body: Any) -> dict[str, Any]:
            time.sleep(0.3)
            return super().chat(**body)

    store.ledger.move(LEARNER, "canary", who="test", reason="as good", percent=50, now=1_000.0)
    sessions(store, since=1_000.0, hours=30, right=0.99, kept=0.5)
    began, engine = time.time(), Slow()
    report = watch_once(store, engine, CONFIG.canary, who="watcher")  # type: ignore[arg-type]
    assert report.outcome == "promoted", report.reason
    assert store.ledger.history(limit=1)[0]["at"] >= began + 0.3


def test_an_undecided_comparison_with_an_earlier_model_makes_the_next_one_no_harder(store: Store):
    words = {f"q{n}": "bad" if n % 3 == 2 else "good" for n in range(200)}
    engine = RuledEngine(lambda policy, question, number: f"{words.get(question)} answer {number}")
    run = Cycle(store, RuledJudge(rates), CONFIG, lambda *_: None, 9.0, engine, Path("/none"), "test")  # type: ignore[arg-type]
    held_out(store, 9)
    assert (first := compare_learner(run, store.ledger.learner())) is not None  # type: ignore[arg-type]
    assert first.metrics[KEY]["more_needed"] > 12
    key = new_id()
    for at, model in ((8.0, "m-1"), (20.0, "m-2")):
        only = Choice(0, {"role": "assistant", "content": "fair"}, "stop")
        asked = ({"role": "user", "content": "x"},)
        store.write([TrajectoryInfo(key, at), Call(new_id(), key, at, "m", asked, (only,), answered_by=model)])
    held_out(store, 7, first=20, at=21.0)
    held_out(store, 9, first=40, at=21.0, policy=LEARNER)
    # People are told of the present model alone.
    told = standing(store, min_scenarios=8)
    assert told == {"policy": LEARNER, "scenarios": 7, "min_scenarios": 8}
    assert compare_learner(run, store.ledger.learner()) is None  # type: ignore[arg-type]
    held_out(store, 1, first=30, at=21.0)
    assert compare_learner(run, store.ledger.learner()) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(("right", "percent"), [(0.99, 50.0), (0.8, 5.0)])
def test_who_ended_a_test_while_it_was_looked_at_is_not_overruled(
    store: Store, monkeypatch: pytest.MonkeyPatch, right: float, percent: float
):
    """The policy learns on, and from there it may be tested again, or serve: as somebody decides, and not the look."""
    from art_patch.promotion import give_up

    seen = store.evidence.arm_traffic

    def overtaken(**which: Any) -> Any:
        found = seen(**which)
        assert give_up(store.ledger, None, who="somebody", reason="complaints") == LEARNER
        return found

    monkeypatch.setattr(store.evidence, "arm_traffic", overtaken)
    report = canary(store, right, percent=percent)
    assert (report.outcome, "somebody else" in report.reason) == ("nothing to watch", True), report
    route = store.ledger.route()
    assert (route.champion, route.challenger, route.learner) == (None, None, LEARNER)


def test_an_operators_share_of_the_control_group_stays(store: Store):
    store.ledger.set_control_group(0, who="me")
    canary(store, 0.99)
    assert store.ledger.route().control_percent == 0.0


def test_a_canary_that_is_worse_than_upstream_learns_on(store: Store):
    report = canary(store, 0.5)
    assert report.outcome == "learns", report.reason
    assert "its reward is worse" in report.reason
    assert store.ledger.route().learner == LEARNER
    assert store.ledger.history(limit=1)[0]["reason"] == report.reason
    held_out(store, 12)
    # Its comparison would pass again; the test on sessions has spoken.
    store.ledger.keep_metrics(LEARNER, metrics={KEY: {"passed": True, "at": 9.0, "scenarios": 12, "reason": "good"}})
    assert compared(store, "good") is None


def test_a_canary_that_is_about_as_good_needs_no_more_than_that(store: Store):
    """It is proven not worse by more than 0.05 where a champion would have to be beaten."""
    report = canary(store, 0.82, hours=160.0)
    assert report.outcome == "promoted", report.reason


def test_a_champion_that_becomes_worse_learns_on_and_its_successor_replaces_upstream(store: Store):
    canary(store, 0.99)
    since = 1_000.0 + 32 * HOUR
    store.ledger.set_control_group(20, who="me", now=since)
    sessions(store, since=since, hours=100, right=0.5, kept=0.2)
    verdict = control_once(store, CONFIG.canary, who="watcher", now=since + 101 * HOUR)
    assert verdict is not None
    assert verdict.action == "roll back"
    route = store.ledger.route()
    assert (route.champion, route.learner) == (None, LEARNER)


def test_rolling_back_the_first_champion_brings_upstream_back(store: Store):
    canary(store, 0.99)
    assert rollback(store.ledger, None, who="me", reason="complaints").state == "learner"
    route = store.ledger.route()
    assert (route.champion, route.learner) == (None, LEARNER)


def test_a_server_that_starts_says_what_learns_or_is_tested(store: Store):
    assert why_none_serves(store) == "agent@0 learns, upstream answers"
    store.ledger.move(LEARNER, "canary", who="test", reason="as good", percent=5)
    assert why_none_serves(store) == "agent@0 is tested, upstream answers"


def test_rolling_back_during_the_test_brings_upstream_back(store: Store):
    from art_patch.promotion import give_up

    store.ledger.move(LEARNER, "canary", who="test", reason="as good", percent=5)
    assert give_up(store.ledger, None, who="me", reason="complaints") == LEARNER
    assert store.ledger.route().learner == LEARNER


def test_a_candidate_that_beats_the_learner_takes_its_place(store: Store):
    from art_patch.pipeline.promote_policy import act_on_verdict

    candidate = Policy("agent@1", "/base", "ff", "candidate", 2.0, path="/none", parent=LEARNER)
    store.ledger.add_candidate(candidate, trained_on=[], who="test")
    run = Cycle(store, RuledJudge(rates), CONFIG, lambda *_: None, 9.0, Engine(), Path("/none"), "test")  # type: ignore[arg-type]
    verdict = Verdict(True, "better", {"difference": 0.2})
    report = act_on_verdict(run, candidate, store.ledger.learner(), verdict)  # type: ignore[arg-type]
    assert (report.outcome, report.champion, report.candidate) == ("learns", None, "agent@1")
    assert report.reason.endswith("better; it is the learner now")  # what upstream does, the comparison with it says
    assert {each.name: each.state for each in store.ledger.policies()} == {LEARNER: "retired", "agent@1": "learner"}
