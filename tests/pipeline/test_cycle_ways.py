"""How a cycle ends besides promoting and rejecting, and the report that each leaves on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from art_patch.demo.judge import STAND_IN_MODEL
from art_patch.errors import JudgeError
from art_patch.pipeline import CycleConfig, CycleReport, retrain
from art_patch.promotion import promote
from art_patch.rewards import Judge
from art_patch.types import Policy
from tests.support.cycles import CONFIG, TRAINING, Place, jobs, reward, rewarded_traffic


def reports(place: Place) -> list[dict]:
    found = sorted((place.adapters.parent / "cycles").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    assert all(path.with_suffix(".md").read_text().startswith("# ") for path in found)
    return [json.loads(path.read_text()) for path in found]


def test_a_cycle_ends_when_its_time_is_up_and_the_next_goes_on(place: Place, judge: Judge):
    rewarded_traffic(place)
    elapsed = [0.0]

    def work(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "train" and done == 3:
            elapsed[0] = 61.0

    report = retrain(
        place.store, place.client, judge, place.adapters, replace(TRAINING, max_minutes=1), who="test", progress=work,
        now=100.0, clock=lambda: elapsed[0],
    )  # fmt: skip
    assert (report.outcome, report.champion, place.states()) == ("out of time", "agent@0", {"agent@0": "champion"})
    assert "1 minutes are over" in report.reason
    assert len(jobs(place)) == 1
    report = place.cycle(judge, TRAINING)
    assert (report.outcome, report.metrics["train"]["resumed"]) == ("promoted", True)
    assert [one["outcome"] for one in reports(place)] == ["out of time", "promoted"]


def test_a_gate_is_not_ended_halfway(place: Place, judge: Judge):
    rewarded_traffic(place)
    elapsed = [0.0]

    def work(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "gate: answers":
            elapsed[0] = 61.0

    report = retrain(
        place.store, place.client, judge, place.adapters, replace(TRAINING, max_minutes=1), who="test", progress=work,
        now=100.0, clock=lambda: elapsed[0],
    )  # fmt: skip
    assert report.outcome == "promoted"
    assert reports(place)[-1]["stages_s"]["gate: answers"] == 61.0


@pytest.mark.parametrize(("minutes", "outcome"), [(5.0, "not idle"), (1.0, "nothing to do")])
def test_nothing_is_done_while_apps_make_calls(place: Place, judge: Judge, minutes: float, outcome: str):
    """The calls began 99 seconds before."""
    place.traffic()
    report = place.cycle(judge, replace(CONFIG, idle_minutes=minutes, min_groups=1000))
    assert report.outcome == outcome
    assert ("group" in report.metrics) == (outcome == "nothing to do")
    if outcome == "not idle":
        assert report == CycleReport(
            "not idle", "apps made 72 calls in the last 5 minutes; the next cycle looks again", "agent@0"
        )


def test_a_winner_may_wait_for_a_person(place: Place, judge: Judge):
    rewarded_traffic(place)
    config = replace(TRAINING, promotion="approve")
    first = place.cycle(judge, config)
    assert (first.outcome, first.champion, first.candidate) == ("waits for approval", "agent@0", "agent@1")
    assert first.reason.endswith("`art-patch promote agent@1` lets it serve")
    assert place.states() == {"agent@0": "champion", "agent@1": "candidate"}
    place.stages.clear()
    rewarded_traffic(place, seed=1)
    again = place.cycle(judge, config)
    assert (again.outcome, again.reason, place.stages) == (first.outcome, first.reason, [])
    promote(place.store.ledger, place.client, "agent@1", who="a person", reason="I looked")
    metrics = place.store.ledger.policy("agent@1").metrics  # type: ignore[union-attr]
    assert (place.champion, {"train", "gate", "waits"} <= set(metrics)) == ("agent@1", True)
    assert "verdict" in {one["action"] for one in audit(place)}


def audit(place: Place) -> list[dict]:
    import sqlite3

    with sqlite3.connect(place.url.removeprefix("sqlite:///")) as raw:
        return [{"action": action} for (action,) in raw.execute("SELECT action FROM audit ORDER BY id")]


def test_a_winner_may_be_tested_on_traffic_first_and_nothing_is_trained_meanwhile(place: Place, judge: Judge):
    rewarded_traffic(place)
    config: CycleConfig = replace(TRAINING, promotion="canary", canary_percent=20.0)
    report = place.cycle(judge, config)
    assert (report.outcome, report.champion, report.candidate) == ("canary", "agent@0", "agent@1")
    assert "answers 20 % of the sessions" in report.reason
    assert place.states() == {"agent@0": "champion", "agent@1": "canary"}
    route = place.store.ledger.route()
    assert (route.champion, route.challenger, route.challenger_percent) == ("agent@0", "agent@1", 20.0)
    rewarded_traffic(place, seed=1)
    place.stages.clear()
    report = place.cycle(judge, config)
    assert (report.outcome, report.candidate, set(place.stages)) == ("canary", "agent@1", {"group"})
    assert place.states() == {"agent@0": "champion", "agent@1": "canary"}


@pytest.mark.parametrize("promotion", ["auto", "canary"])
def test_too_few_users_for_the_gate_are_enough_for_a_canary(place: Place, judge: Judge, promotion: Any):
    place.traffic(user="ann")
    reward(place)
    report = place.cycle(judge, replace(TRAINING, promotion=promotion))
    assert report.reason.startswith("cannot decide: the scenarios come from 1 user, at least 5 are needed")
    assert report.outcome == ("canary" if promotion == "canary" else "rejected")
    assert place.states() == {"agent@0": "champion", "agent@1": report.outcome}
    assert report.metrics["gate"]["users_needed"] == 5


def test_who_was_tested_against_a_champion_that_a_person_replaced_meanwhile_is_rejected(place: Place, judge: Judge):
    rewarded_traffic(place)

    def work(stage: str, done: int, total: int, note: str = "") -> None:
        ledger = place.store.ledger
        if stage == "gate: judge" and ledger.policy("agent@7") is None:
            base = ledger.policy("agent@0")
            assert base is not None
            ledger.add_candidate(
                Policy("agent@7", base.base, base.base_sha256, "candidate", 1.0, parent="agent@0"),
                trained_on=[],
                who="a person",
            )
            ledger.move("agent@7", "champion", who="a person", reason="I know it")

    report = retrain(place.store, place.client, judge, place.adapters, TRAINING, who="test", progress=work, now=100.0)
    assert (report.outcome, report.champion) == ("rejected", "agent@7")
    assert report.reason == "agent@7 is champion since; it was tested against agent@0"
    assert place.states() == {"agent@0": "retired", "agent@7": "champion", "agent@1": "rejected"}


@pytest.mark.parametrize("promotion", ["auto", "canary"])
def test_who_beat_a_champion_that_upstream_replaced_meanwhile_learns(place: Place, judge: Judge, promotion: Any):
    rewarded_traffic(place)

    def work(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "gate: judge" and place.store.ledger.champion() is not None:
            place.store.ledger.move("agent@0", "learner", who="the server", reason="worse than upstream")

    config = replace(TRAINING, promotion=promotion)
    report = retrain(place.store, place.client, judge, place.adapters, config, who="test", progress=work, now=100.0)
    assert (report.outcome, report.champion) == ("learns", None)
    assert report.reason.startswith("better than agent@0: ")
    assert place.states() == {"agent@0": "retired", "agent@1": "learner"}
    learns, made = place.store.ledger.history(limit=2, policy="agent@1")
    assert learns["at"] >= made["at"]  # when it was decided, and not when the cycle began
    route = place.store.ledger.route()
    assert (route.champion, route.learner) == (None, "agent@1")


def test_a_cycle_that_fails_leaves_a_report_too(place: Place):
    place.traffic()
    dead = Judge(STAND_IN_MODEL, base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0, pause_s=0.0)
    with pytest.raises(JudgeError):
        place.cycle(dead)
    (report,) = reports(place)
    assert (report["outcome"], report["champion"], report["who"]) == ("failed", "agent@0", "test")
    assert report["reason"].startswith("JudgeError: ")
    assert "group" in report["metrics"]
