"""A cycle while a challenger is tested: a judge's scores of the app's traffic decide. The engine is in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch._lib.ids import new_id
from art_patch.grouping import form_groups
from art_patch.pipeline import CycleConfig, CycleReport, retrain, watch_once
from art_patch.promotion import CanaryConfig
from art_patch.store import Store, open_store
from art_patch.types import Policy, Trajectory, TrajectoryInfo
from tests.support.factory import make_call
from tests.support.memory_engine import Engine
from tests.support.ruled_judge import Fake, said

NEW, OLD = "agent@1", "agent@0"
BEGAN, HOUR = 1_000.0, 3_600.0
POLITE, CURT = "three plums, thank you so much", "three plums and leave me alone"
CONFIG = CycleConfig(settle_s=0.0, holdout_share=0.0, canary=CanaryConfig(min_sessions=10))


def polite(trajectory: Trajectory, _: str = "") -> float:
    """What a judge thinks of an answer, and no other signal tells."""
    return 0.9 if "thank" in said(trajectory) else 0.3 if "plums" in said(trajectory) else 0.0


class Place:
    """A project whose canary answers a share of the sessions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store: Store = open_store(f"sqlite:///{directory}/store.db")
        self.engine = Engine(NEW)
        ledger = self.store.ledger
        ledger.add_base(OLD, "/base", "ff", who="test", now=0.0)
        policy = Policy(NEW, "/base", "ff", "candidate", 1.0, path="/a/agent@1", parent=OLD)
        ledger.add_candidate(policy, trained_on=[], who="test")
        ledger.move(NEW, "canary", who="test", reason="try", percent=30, now=BEGAN)

    def traffic(self, answers: Callable[[str], str], *, seed: int = 0, tasks: int = 30, **of_new: Any) -> None:
        """Eight sessions of one call for each of the tasks."""
        rng = random.Random(seed)
        records: list[Any] = []
        for task in range(tasks):
            for _ in range(8):
                policy, run = NEW if rng.random() < 0.3 else OLD, new_id()
                call = make_call(
                    new_id(), trajectory_id=run, started_at=BEGAN + 10 * task + rng.random(), policy=policy,
                    text=answers(policy), duration_ms=100.0, completion_tokens=9,
                )  # fmt: skip
                info = TrajectoryInfo(run, call.started_at, scenario_key=f"task {seed}.{task}", session_id=run)
                records += [info, replace(call, **of_new) if policy == NEW else call]
        self.store.write(records)

    def look(self) -> str:
        return watch_once(self.store, self.engine, CONFIG.canary, who="watcher", now=BEGAN + HOUR).outcome

    def cycle(self, judge: Fake, config: CycleConfig = CONFIG, *, hours: float = 1.0, **how: Any) -> CycleReport:
        silent = {"progress": lambda *_: None} | how
        return retrain(
            self.store, self.engine, judge, self.directory / "adapters", config, who="test",
            now=BEGAN + hours * HOUR, **silent,
        )  # fmt: skip

    def states(self) -> dict[str, str]:
        return {policy.name: policy.state for policy in self.store.ledger.policies()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    here = Place(tmp_path)
    yield here
    assert here.store.verify() == []
    here.store.close()


def worse(policy: str) -> str:
    return CURT if policy == NEW else POLITE


def test_a_regression_that_only_a_judge_can_see_is_rolled_back(place: Place):
    place.traffic(worse)
    assert place.look() == "goes on"
    waiting = place.store.read.ungrouped(settled_before=BEGAN + HOUR)
    report = place.cycle(Fake(polite))
    assert (report.outcome, report.champion, report.candidate) == ("rejected", OLD, NEW)
    assert "its reward is worse: 0.300 against 0.900" in report.reason
    assert place.states() == {OLD: "champion", NEW: "rejected"}
    assert (place.store.ledger.route().challenger, place.engine.served) == (None, [OLD])
    assert report.metrics["group"]["groups"] == report.metrics["score"]["groups"] == 30
    assert report.metrics["score"]["planted_answers"] > 0  # the judge is doubted as always
    assert {name: one["says"] for name, one in report.metrics["canary"]["signals"].items() if name != "ttft_ms"} == {
        "reward": "worse", "feedback": "no data", "failed": "open", "empty": "open", "latency_ms": "open",
    }  # fmt: skip
    # What was scored waits for training as if no canary had been there.
    scored = place.store.read.groups(state="scored")
    others = form_groups(waiting, new_id=new_id, min_size=CONFIG.min_group_size, holdout_share=0.0).groups
    assert {(g.scenario_key, frozenset(t.id for t in g.trajectories)) for g in scored} == {
        (g.scenario_key, frozenset(t.id for t in g.trajectories)) for g in others
    }


def test_a_challenger_that_a_judge_prefers_is_promoted_though_its_time_was_up_before_anybody_judged(place: Place):
    place.traffic(lambda policy: POLITE if policy == NEW else CURT)
    report = place.cycle(Fake(polite), hours=169.0)
    assert (report.outcome, report.champion) == ("promoted", NEW), report.reason
    assert place.states() == {OLD: "retired", NEW: "champion"}


def test_an_equal_challenger_is_neither_rejected_nor_promoted_until_its_time_is_up(place: Place):
    noise = random.Random(3)
    for day in range(3):
        place.traffic(lambda _: noise.choice((POLITE, CURT)), seed=day)
        report = place.cycle(Fake(polite), hours=1.0 + day)
        assert (report.outcome, "neither worse nor better is proven yet" in report.reason) == ("canary", True)
    assert report.metrics["canary"]["signals"]["reward"]["compared"] > 60
    report = place.cycle(Fake(polite), hours=168.0)
    assert (report.outcome, "no answer within 168 hours" in report.reason) == ("rejected", True)


def test_a_judge_that_fails_is_named_and_the_looks_are_taken(place: Place):
    place.traffic(worse)
    mute = Fake(polite, mute_in="score")
    report = place.cycle(mute)
    assert (report.outcome, place.states()[NEW]) == ("canary", "canary")
    assert report.reason.endswith("; not judged: all mute")
    assert report.metrics["canary"]["signals"]["failed"]["compared"] > 0
    place.traffic(worse, seed=1, status="error", choices=())
    asked = len(mute.asked)
    assert place.cycle(mute).outcome == "rejected"
    assert len(mute.asked) == asked  # it was given up before the judge was asked


def test_what_an_undecided_judge_said_is_no_evidence_yet_and_the_next_cycle_goes_on(place: Place):
    """Time is up while the judge is at work."""
    place.traffic(worse)
    elapsed = [0.0]

    def work(stage: str, done: int, total: int, note: str = "") -> None:
        elapsed[0] = 61.0 if stage == "score" and done > 20 else 0.0

    hurried = replace(CONFIG, max_minutes=1)
    report = place.cycle(Fake(polite), hurried, progress=work, clock=lambda: elapsed[0])
    assert report.outcome == "canary"
    assert report.reason.endswith("; not judged: 1 minutes are over")
    assert report.metrics["canary"]["signals"]["reward"]["says"] == "no data"
    assert place.look() == "goes on"
    assert place.cycle(Fake(polite)).outcome == "rejected"


def test_no_judge_is_asked_while_apps_make_calls_nor_of_a_shadow(place: Place):
    place.traffic(worse)
    judge = Fake(polite)
    report = place.cycle(judge, replace(CONFIG, idle_minutes=120.0))
    assert report.outcome == "canary"
    assert "; not judged: apps made 240 calls in the last 120 minutes" in report.reason
    place.store.ledger.move(NEW, "rejected", who="test", reason="make room")
    shadow = Policy("agent@2", "/base", "ff", "candidate", 2.0, path="/a/agent@2", parent=OLD)
    place.store.ledger.add_candidate(shadow, trained_on=[], who="test")
    place.store.ledger.move("agent@2", "shadow", who="test", reason="try", now=BEGAN)
    assert place.cycle(judge).outcome == "canary"
    assert judge.asked == []


def test_what_somebody_decides_while_the_judge_is_at_work_stands(place: Place):
    place.traffic(worse)

    def work(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "score" and place.states()[NEW] == "canary":
            place.store.ledger.move(NEW, "rejected", who="a person", reason="by hand")

    report = place.cycle(Fake(polite), progress=work, clock=time.monotonic)
    assert (report.outcome, report.champion, report.candidate) == ("rejected", OLD, NEW)
    assert report.reason == f"{NEW} is rejected since: somebody else decided on it while it was tested"
    assert place.store.ledger.history(limit=1)[0]["who"] == "a person"


def test_what_somebody_decides_of_a_candidate_at_the_gate_stands(place: Place):
    ledger = place.store.ledger
    ledger.move(NEW, "rejected", who="test", reason="make room")
    path = place.directory / "agent@2"
    path.mkdir()
    candidate = Policy("agent@2", "/base", "ff", "candidate", 2.0, path=str(path), parent=OLD)
    ledger.add_candidate(candidate, trained_on=[], who="test")

    class Beside(Engine):
        def load(self, name: str) -> None:
            super().load(name)
            ledger.move(name, "rejected", who="a person", reason="I read its answers")

    place.engine = Beside()
    report = place.cycle(Fake(polite))
    assert (report.outcome, report.champion) == ("rejected", OLD)
    assert report.reason == "agent@2 is rejected since: somebody else decided on it while it was tested"
    assert ledger.history(limit=1)[0]["who"] == "a person"
