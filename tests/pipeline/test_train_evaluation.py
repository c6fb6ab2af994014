"""What an update is evaluated on: held-out groups that have rewards, none of which it learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from art_patch.pipeline.train_policy import make_job
from art_patch.rewards import Judge
from art_patch.training import read_job
from tests.pipeline.learning import Learning, answered
from tests.support.cycles import TRAINING, Place, die_after, jobs, rewarded_traffic, trained_on

EVALUATING = replace(TRAINING, train=replace(TRAINING.train, eval_steps=3))


@pytest.fixture
def learning(tmp_path: Path, base: Path) -> Iterator[Learning]:
    here = Learning(tmp_path, base)
    yield here
    assert here.store.verify() == []
    here.store.close()


def test_a_cycle_evaluates_on_held_out_groups_and_tells_it(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 3, EVALUATING)
    (directory,) = jobs(place)
    job = read_job(directory)
    assert job is not None
    held_out = {group.id for group in place.store.read.groups(state="formed", held_out=True)}
    assert job.evaluation
    assert {group.id for group in job.evaluation} <= held_out
    assert not job.evaluated_ids & job.trajectory_ids
    place.store.rights.erase(trajectory=min(job.evaluated_ids))
    report = place.cycle(judge, EVALUATING)
    assert report.outcome == "promoted"
    train = report.metrics["train"]
    assert "resumed" not in train  # what was erased is not evaluated on either
    assert train["evaluation"]["groups"] in (len(job.evaluation), len(job.evaluation) - 1)
    assert [n for n, step in enumerate(train["history"], 1) if "eval_loss" in step] == [3, 6, 8]
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    for name in ("eval_loss", "eval_kl_nats", "eval_gain_nats"):
        assert policy.metrics["train"][name] == train[name] == train["history"][-1][name]
    assert train["eval_kl_nats"] > 0
    assert not held_out & trained_on(place)


def test_groups_that_nothing_can_be_evaluated_on_are_counted_by_reason(learning: Learning):
    learning.group("now", (0.0, [answered((1,), (2,))]), (1.0, [answered((1,), (3,))]))
    better, worse = answered((5,), (6,)), answered((5,), (7,))
    learning.group("fine", (1.0, [better]), (0.0, [worse]), (None, [worse]), state="formed")
    learning.group("unscored", (None, [better]), (0.5, [worse]), state="formed")
    learning.group("alike", (0.5, [better]), (0.5, [worse]), state="formed")
    inexact = answered((5,), (6,), params={"top_p": 0.5})
    learning.group("inexact", (1.0, [inexact]), (0.0, [inexact]), state="formed")
    (now,), others = (learning.store.read.groups(state=state) for state in ("scored", "formed"))
    for eval_steps, groups, metrics in (
        (None, others, None),
        (1, (), {"groups": 0, "why": "there is no group to evaluate on"}),
        (1, others, {"groups": 1, "left_out": {
            "not scored": 1, "all siblings that are trained were scored alike": 1, "top_p cuts the distribution": 1}}),
    ):  # fmt: skip
        cycle = learning.cycle(eval_steps=eval_steps)
        job = make_job(cycle, learning.champion, [now], learning.adapters / "agent@1", evaluation=groups)
        assert job is not None
        assert cycle.metrics["train"].get("evaluation") == metrics
        assert [group.id for group in job.evaluation] == ["fine"][: (metrics or {"groups": 0})["groups"]]
        assert [group.id for group in job.groups] == ["now"]
    assert set(learning.store.read.group_ids(state="formed")) == {"fine", "unscored", "alike", "inexact"}
