"""Corrections and judgements: kept, replaced, read, erased; and what people say beside what the judge says."""

from __future__ import annotations

import json
from typing import Any

from art_patch.rewards import PEOPLE, disagreement
from art_patch.rewards.combine import Disagreement
from art_patch.store import Filter, Store
from art_patch.types import Correction, Group, Judgement, Policy, Score
from tests.support.postgres import Execute
from tests.support.store_samples import call, info

ANSWER = {"role": "assistant", "content": "caf\u00e9 \U0001f600"}


def correction(key: str, trajectory: str = "t1", at: float = 1.0, **changes) -> Correction:
    values = {"id": key, "trajectory_id": trajectory, "at": at, "source": "user", "message": ANSWER, "comment": "why"}
    return Correction(**(values | changes))


def judgement(execute: Execute, key: str, group: str) -> None:
    columns = "id, group_id, at, judge, rubric, purpose, state, calls, prompt_tokens, completion_tokens, facts, "
    columns += "project_id, agent_id"
    values = f"'{key}', '{group}', 1, 'j', 'r', 'score', 'ok', 1, 1, 1, '{{}}', 1, 1"
    execute(f"INSERT INTO judgements ({columns}) VALUES ({values})")


def test_they_come_back_as_they_went_in_and_are_replaced_by_id(store: Store):
    late, early = correction("b", at=2.0, call_id="c1"), correction("a", comment=None)
    store.write([info("t1"), info("t2"), late, early, correction("c", "t2")])
    assert store.evidence.corrections(["t1", "t2", "t3"]) == {"t1": [early, late], "t2": [correction("c", "t2")]}
    again = correction("b", at=3.0, message={"role": "assistant", "content": "no"})
    store.write([again])
    assert store.evidence.corrections(["t1"]) == {"t1": [early, again]}
    assert store.verify() == []


def test_runs_in_no_group_that_the_app_rewarded_newest_scores_first(store: Store):
    def score(key: str, trajectory: str, source: str, at: float) -> Score:
        return Score(key, trajectory, "reward", 1.0, source, at)

    runs = [info(f"t{number}") for number in range(6)]
    given = [score("a", "t0", "user", 5.0), score("b", "t1", "code", 6.0), score("c", "t1", "user", 2.0)]
    others = [score("d", "t2", "judge", 9.0), score("e", "t3", "user", 1.0), score("f", "t4", "user", 9.0)]
    store.write([*runs, *given, *others])
    store.ledger.add_groups([Group("g", "k", "same_task", store.read.trajectories(["t4", "t5"]))], now=1.0)
    assert store.evidence.rewarded_alone(since=1.0, limit=9) == ("t1", "t0")
    assert store.evidence.rewarded_alone(since=1.0, limit=1) == ("t1",)
    assert store.evidence.rewarded_alone(since=6.0, limit=9) == ()


def test_erasing_takes_corrections_and_the_judgements_of_groups_that_end(store: Store, execute: Execute):
    for key, user in (("t1", "u"), ("t2", "u"), ("t3", "u"), ("t4", "v")):
        store.write([info(key, user_id=user), call(f"{key}-c", key), correction(f"{key}-x", key)])
    whole = Group("own", "task:own", "same_task", store.read.trajectories(["t1", "t2"]))
    part = Group("shared", "task:shared", "same_task", store.read.trajectories(["t3", "t4"]))
    store.ledger.add_groups([whole, part], now=1.0)
    for key, group in (("j1", "own"), ("j2", "own"), ("j3", "shared")):
        judgement(execute, key, group)
    plan = store.rights.erase(user="u", dry_run=True)
    assert (plan.trajectories, plan.corrections, plan.judgements) == (3, 3, 2)
    store.rights.erase(user="u", now=9.0)
    assert execute("SELECT id FROM corrections") == [("t4-x",)]
    assert execute("SELECT id FROM judgements") == [("j3",)]
    ((detail,),) = execute("SELECT detail FROM audit WHERE action = 'erased'")
    noted = json.loads(detail) if isinstance(detail, str) else detail
    assert (noted["corrections"], noted["judgements"]) == (3, 2)
    assert store.verify() == []


def test_the_newest_second_passes_of_the_judge_are_read(store: Store):
    def asked(key: str, at: float, purpose: str = "second pass", state: Any = "ok") -> Judgement:
        return Judgement(key, f"g-{key}", at, "judge", "r", purpose, state, facts={"noise": at, "siblings": 3})

    made = [asked("a", 1.0), asked("b", 3.0), asked("c", 2.0)]
    for each in [*made, asked("d", 9.0, "score"), asked("e", 9.0, state="failed")]:
        store.ledger.add_judgement(each)
    assert store.evidence.second_passes() == (made[1], made[2], made[0])
    assert store.evidence.second_passes(limit=1) == (made[1],)


def test_a_correction_that_comes_after_the_erasure_can_be_erased_too(store: Store, execute: Execute):
    store.write([correction("late", "gone")])
    assert store.rights.erase(trajectory="gone", dry_run=True).corrections == 1
    store.rights.erase(trajectory="gone")
    assert execute("SELECT id FROM corrections") == []


def grouped(store: Store, *keys: str, group: str = "g") -> None:
    for key in keys:
        store.write([info(key), call(f"{key}-c", key)])
    store.ledger.add_groups([Group(group, f"task:{group}", "same_task", store.read.trajectories(keys))], now=1.0)


def given(key: str, name: str, value: float, source: str, group: str | None = "g", at: float = 1.0) -> Score:
    return Score(f"{key}-{name}-{source}-{at}", key, name, value, source, at, group_id=group)


def test_the_reward_that_is_shown_is_the_combined_one_of_its_group(store: Store):
    grouped(store, "a", "b", "c")
    store.write([given(key, "ruler", 0.9, "ruler") for key in "abc"])
    store.write([given("a", "reward", 0.4, "combined"), given("a", "reward", 1.0, "user", None, at=9.0)])
    store.write([given("b", "reward", 0.4, "combined", "other"), given("b", "reward", 0.6, "code", None)])
    assert [one.reward for one in store.browse.summaries(["a", "b", "c"])] == [0.4, 0.6, 0.9]
    assert store.browse.count(Filter(max_reward=0.5)) == 1


def test_people_and_the_judge_are_compared_without_reading_calls(store: Store):
    grouped(store, "a", "b")
    grouped(store, "c", "d", group="h")
    store.write([given("a", "ruler", 0.9, "ruler"), given("b", "ruler", 0.1, "ruler")])
    store.write([given("a", "ruler", 0.0, "ruler", "other", at=5.0)])
    store.write([given("a", "thumbs", 0.0, "user", None), given("b", "thumbs", 1.0, "user", None)])
    store.write([given("c", "ruler", 0.9, "ruler", "h"), given("d", "other", 1.0, "user", None)])
    (group,) = store.evidence.opinions(PEOPLE)
    assert (group.id, group.scenario_key, [t.id for t in group.trajectories]) == ("g", "task:g", ["a", "b"])
    assert all(t.calls == () for t in group.trajectories)
    assert disagreement([group]) == Disagreement(pairs=1, against=1, tied=0, groups=1)


def test_who_was_corrected_since_newest_first_and_none_that_is_held_out(store: Store):
    for number, key in enumerate(("t1", "t2", "t3", "t4")):
        store.write([info(key), call(f"{key}-c", key), correction(f"{key}-x", key, at=float(number))])
    store.write([correction("t1-y", "t1", at=9.0), correction("x", "gone", at=9.0)])
    (held, free) = (store.read.trajectories([key]) for key in ("t3", "t4"))
    store.ledger.add_groups([Group("h", "task:h", "single", held, True), Group("f", "task:f", "single", free)], now=1.0)
    assert store.evidence.corrected(since=0.0, limit=9) == ("t1", "t4", "t2")
    assert store.evidence.corrected(since=0.0, limit=2) == ("t1", "t4")
    assert store.evidence.corrected(since=1.0, limit=9) == ("t1", "t4")
    assert store.evidence.corrected(since=9.0, limit=9) == ()


def test_erasing_names_the_policies_that_learned_from_a_run_outside_of_groups(store: Store, execute: Execute):
    store.write([info("t1", user_id="u"), call("t1-c", "t1"), info("t2", user_id="v"), call("t2-c", "t2")])
    policy = Policy("agent@1", "base", "0" * 64, "candidate", 1.0, path="/adapters/agent@1")
    store.ledger.add_candidate(policy, trained_on=[], also=["t1"], who="test")
    assert store.rights.erase(user="v", dry_run=True).policies == ()
    (taught,) = store.rights.erase(user="u").policies
    assert taught.name == "agent@1"
    assert "t1" not in str(execute("SELECT * FROM trainings"))
    assert store.verify() == []
