"""The cycle over a real engine, a real store and real RULER; only the judge's opinion is a rule."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from art_patch._lib.ids import new_id
from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge
from art_patch.errors import Busy, EngineError, JudgeError, StoreError, TransitionError
from art_patch.pipeline import project_lock, retrain
from art_patch.promotion import ensure_loaded, promote
from art_patch.promotion.transitions import rollback
from art_patch.rewards import Judge
from art_patch.serving import EngineClient
from art_patch.types import Score
from tests.support.cycles import CONFIG, QUESTIONS, WORDS, Dies, Place, eager, is_foreign


def test_a_cycle_trains_gates_and_promotes_and_the_next_goes_on_from_there(place: Place, judge: Judge):
    place.traffic(siblings=8, questions=[*QUESTIONS, *(f"how much is a {word}?" for word in WORDS)])
    # As in `CONFIG`, without bounds of its distance: within them a random model gains less than this gate can prove.
    hard = replace(CONFIG.train, learning_rate=6e-2, epochs=8, minibatches=1)
    with serve_stand_in_judge(is_foreign) as url:
        foreign = Judge(STAND_IN_MODEL, base_url=url, api_key="none")
        # Eight samples a turn left the bound two standard deviations from zero: a run in ten was rejected.
        report = place.cycle(foreign, replace(CONFIG, train=hard, gate=replace(CONFIG.gate, samples=32)))
    assert (report.outcome, report.champion, report.candidate) == ("promoted", "agent@1", "agent@1"), report
    assert place.states() == {"agent@0": "retired", "agent@1": "champion"}
    assert place.store.ledger.route().champion == "agent@1"
    assert place.client.models() == ["agent@0", "agent@1"]
    train, gate = report.metrics["train"], report.metrics["gate"]
    assert train["logprob_gap_nats"] < 1e-4
    assert gate["lower_bound"] > 0
    assert list(dict.fromkeys(place.stages)) == ["group", "score", "train", "gate: answers", "gate: judge", "promote"]
    assert place.store.read.groups(state="scored") == ()

    place.traffic("agent@1", seed=1)
    report = place.cycle(judge, eager())
    assert (report.outcome, report.candidate) == ("promoted", "agent@2")
    assert place.store.ledger.policy("agent@2").parent == "agent@1"  # type: ignore[union-attr]


def test_held_out_scenarios_are_neither_judged_nor_trained_on(place: Place, judge: Judge):
    place.traffic()
    place.cycle(judge)
    held_out = place.store.read.groups(state="formed", held_out=True)
    assert held_out
    assert not any(t.scores for group in held_out for t in group.trajectories)
    assert not {g.scenario_key for g in held_out} & {g.scenario_key for g in place.store.read.groups(state="trained")}


def test_a_candidate_that_does_not_win_is_rejected_and_unloaded(place: Place, judge: Judge):
    place.traffic()
    report = place.cycle(judge, replace(CONFIG, gate=replace(CONFIG.gate, margin=0.99)))
    assert (report.outcome, report.champion) == ("rejected", "agent@0")
    assert "not proven better: if it were better by 0.99, a result like this comes up more than once" in report.reason
    assert place.states() == {"agent@0": "champion", "agent@1": "rejected"}
    assert place.client.models() == ["agent@0"]
    place.traffic(seed=1)
    assert place.cycle(judge, eager()).candidate == "agent@2"  # a name is never used twice


def test_groups_of_a_rejected_candidate_are_trained_on_again_and_not_judged_again(place: Place, judge: Judge):
    place.traffic()
    strict = replace(CONFIG, gate=replace(CONFIG.gate, margin=0.99))
    first = place.cycle(judge, strict)
    assert (first.outcome, first.candidate, first.metrics["score"]["calls"] > 0) == ("rejected", "agent@1", True)
    waiting = place.store.read.group_ids(state="scored")
    assert len(waiting) == first.metrics["train"]["groups"] > 2
    for candidate in ("agent@2", "agent@3"):
        again = place.cycle(judge, strict)
        assert (again.outcome, again.candidate) == ("rejected", candidate)
        assert again.metrics["train"]["groups"] == first.metrics["train"]["groups"]
        assert again.metrics["score"] == {"groups": 0, "unscored": 0}
    assert place.store.read.group_ids(state="stale") == waiting  # three tries are enough
    assert place.cycle(judge, strict).outcome == "nothing to do"


def test_a_champion_that_is_gone_back_from_keeps_its_groups(place: Place, judge: Judge):
    place.traffic()
    place.cycle(judge, eager())
    learned = place.store.read.group_ids(state="trained")
    rollback(place.store.ledger, place.client, who="test", reason="worse")
    assert place.states() == {"agent@0": "champion", "agent@1": "retired"}
    assert (place.store.read.group_ids(state="trained"), place.store.read.group_ids(state="scored")) == (learned, ())


def test_without_traffic_there_is_nothing_to_do(place: Place, judge: Judge):
    report = place.cycle(judge)
    assert report.outcome == "nothing to do"
    assert "0 scored groups, 2 are needed" in report.reason


def test_without_held_out_scenarios_nothing_is_trained_and_nothing_lost(place: Place, judge: Judge):
    place.traffic()
    report = place.cycle(judge, replace(CONFIG, holdout_share=0.0))
    assert report.outcome == "nothing to do"
    assert "held-out scenarios" in report.reason
    assert place.store.read.groups(state="scored")


def test_equal_scores_teach_nothing(place: Place):
    place.traffic()
    with serve_stand_in_judge(lambda _: 0.5) as url:
        report = place.cycle(Judge(STAND_IN_MODEL, base_url=url, api_key="none"))
    assert report.outcome == "nothing to do"
    assert "scored alike" in report.reason
    assert {len(place.store.read.groups(state=s)) for s in ("scored", "trained")} == {0}
    assert place.store.read.groups(state="dead")
    assert not place.adapters.exists() or not list(place.adapters.iterdir())


def test_a_users_own_rewards_need_no_judge_and_win_over_it(place: Place, judge: Judge):
    place.traffic()
    pending = place.store.read.ungrouped(settled_before=100.0)
    place.store.write([Score(new_id(), t.id, "reward", float(n % 2), "user", 1.0) for n, t in enumerate(pending)])
    report = place.cycle(judge, eager())
    assert report.metrics["score"]["unscored"] == 0
    assert "calls" not in report.metrics["score"]
    assert report.metrics["train"]["mean_reward"] == pytest.approx(0.5)


def test_a_judge_that_is_down_leaves_everything_for_the_next_cycle(place: Place, judge: Judge):
    place.traffic()
    dead = Judge(STAND_IN_MODEL, base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0, pause_s=0.0)
    with pytest.raises(JudgeError):
        place.cycle(dead)
    assert place.states() == {"agent@0": "champion"}
    assert not place.store.read.groups(state="scored")
    assert place.cycle(judge, eager()).outcome == "promoted"


@pytest.mark.parametrize("stage", ["score", "train", "gate: answers", "gate: judge", "promote"])
def test_a_cycle_that_died_is_taken_up_where_it_stopped(place: Place, judge: Judge, stage: str):
    place.traffic()

    def die(now_at: str, done: int, total: int, note: str = "") -> None:
        if now_at == stage:
            raise Dies

    with pytest.raises(Dies):
        retrain(place.store, place.client, judge, place.adapters, eager(), who="test", progress=die, now=100.0)
    assert place.champion == "agent@0"
    report = place.cycle(judge, eager())
    assert report.outcome == "promoted"
    assert len(place.store.read.groups(state="trained")) == len(
        {g.id for g in place.store.read.groups(state="trained")}
    )
    if stage.startswith(("gate", "promote")):
        assert (report.candidate, "train" in place.stages) == ("agent@1", False)


def test_only_one_cycle_runs_at_a_time(place: Place, judge: Judge):
    with project_lock(place.adapters.parent), pytest.raises(Busy, match="another cycle"):
        place.cycle(judge)


def test_an_engine_that_is_down_costs_no_training(place: Place, judge: Judge, tmp_path: Path):
    place.traffic()
    down = EngineClient("http://127.0.0.1:9")
    with pytest.raises(EngineError):
        retrain(place.store, down, judge, place.adapters, eager(), who="test", progress=lambda *_: None, now=100.0)
    down.close()
    assert place.states() == {"agent@0": "champion", "agent@1": "candidate"}
    report = place.cycle(judge, eager())
    assert (report.outcome, report.candidate) == ("promoted", "agent@1")


def test_rollback_goes_back_one_champion_at_a_time_with_and_without_an_engine(place: Place, judge: Judge):
    for step in range(2):
        place.traffic(f"agent@{step}", seed=step)
        place.cycle(judge, eager())
    assert place.champion == "agent@2"
    assert rollback(place.store.ledger, place.client, who="me", reason="worse").name == "agent@1"
    assert rollback(place.store.ledger, None, who="me", reason="worse still").name == "agent@0"
    with pytest.raises(StoreError, match="no earlier champion"):
        rollback(place.store.ledger, None, who="me", reason="?")
    back = rollback(place.store.ledger, place.client, to="agent@2", who="me", reason="it was not the model")
    assert back.name == "agent@2"
    assert place.states() == {"agent@0": "retired", "agent@1": "retired", "agent@2": "champion"}


def test_what_cannot_be_proven_is_not_promoted(place: Place, judge: Judge):
    with pytest.raises(StoreError, match="no policy"):
        promote(place.store.ledger, place.client, "agent@9", who="me", reason="x")
    with pytest.raises(TransitionError, match="already champion"):
        promote(place.store.ledger, place.client, "agent@0", who="me", reason="x")
    place.traffic()
    place.cycle(judge, replace(CONFIG, gate=replace(CONFIG.gate, margin=0.99)))
    with pytest.raises(TransitionError, match="stays that way"):
        promote(place.store.ledger, place.client, "agent@1", who="me", reason="x")
    with pytest.raises(EngineError):
        ensure_loaded(place.client, "agent@77")
    assert place.champion == "agent@0"


def test_every_decision_is_in_the_audit_log(place: Place, judge: Judge):
    place.traffic()
    place.cycle(judge, eager())
    with sqlite3.connect(place.url.removeprefix("sqlite:///")) as raw:
        actions = [row[0] for row in raw.execute("SELECT action FROM audit ORDER BY id")]
    assert actions == ["move", "move", "move", "move", "move"]
    assert [m["to_state"] for m in place.store.ledger.history()][:2] == ["retired", "champion"]
