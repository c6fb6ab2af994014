"""What an update was made of, in the figures of cycle and policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art_patch.rewards.judge import Judge
from tests.stages.test_resample import RESAMPLING, upstream_traffic
from tests.stages.test_train import TRAINING, die_after, reward, rewarded_traffic
from tests.test_cycle import Place, base, judge, place

__all__ = ["base", "judge", "place"]

pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")


def scored_calls(place: Place) -> list[Any]:
    groups = place.store.read.groups(state="trained")
    return [call for group in groups for run in group.trajectories for call in run.calls]


def test_rows_of_all_groups_are_counted_and_stay_with_the_policy(place: Place, judge: Judge):
    rewarded_traffic(place)
    report = place.cycle(judge, TRAINING)
    calls = scored_calls(place)
    rows = report.figures["train"]["rows"]
    assert rows == {
        "rows": len(calls), "forks": 0, "tokens": sum(len(call.choices[0].token_ids) for call in calls),
        "cut_tokens": 0, "other_choices": 0, "left_out": {},
    }  # fmt: skip
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    assert policy.figures["train"]["rows"] == rows


def test_what_is_not_exact_or_too_old_is_counted_by_reason(place: Place, judge: Judge):
    place.traffic()
    first = place.store.read.ungrouped(settled_before=100.0)
    some = [run.calls[0] for run in first[:5]]
    place.store.write([replace(call, id=f"{call.id}-top-p", params={"top_p": 0.9}) for call in some])
    reward(place)
    report = place.cycle(judge, TRAINING)
    held_out = {run.id for g in place.store.read.groups(state="formed", held_out=True) for run in g.trajectories}
    expected = sum(call.trajectory_id not in held_out for call in some)
    left_out = report.figures["train"]["rows"]["left_out"]
    assert left_out == ({"top_p cuts the distribution": expected} if expected else {})

    rewarded_traffic(place, "agent@0", seed=1)
    rewarded_traffic(place, "agent@1", seed=2)
    fresh = replace(TRAINING, train=replace(TRAINING.train, max_staleness=0))
    left_out = place.cycle(judge, fresh).figures["train"]["rows"]["left_out"]
    assert left_out["not sampled within 0 steps of the champion"] > 0


def test_an_update_that_is_gone_on_with_has_the_figures_that_it_began_with(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 3)
    rewarded_traffic(place, seed=1)
    train = place.cycle(judge, TRAINING).figures["train"]
    assert train["resumed"] is True
    assert train["rows"]["rows"] == len(scored_calls(place))
    assert train["groups"] == len(place.store.read.group_ids(state="trained"))


def test_what_cannot_be_imitated_or_told_apart_is_counted_by_reason(place: Place, judge: Judge):
    upstream_traffic(place)
    config = replace(RESAMPLING, train=replace(TRAINING.train, imitate_from=0.5, prefer_from=5.0, max_kl_nats=None))
    train = place.cycle(judge, config).figures["train"]
    groups = place.store.read.groups(state="trained")
    copies = sum(len(group.trajectories) - 1 for group in groups)
    assert sum(train["not_imitated"].values()) == copies
    assert set(train["not_imitated"]) <= {"reward too low", "answered by a policy", "learned from another copy"}
    assert train["not_preferred"] == {"no two siblings with this prompt differ enough": len(groups)}
    assert (train["demonstrations"], train["pairs"]) == (len(groups), 0)


def test_nothing_is_said_of_what_was_not_asked_for(place: Place, judge: Judge):
    rewarded_traffic(place)
    assert not {"not_imitated", "not_preferred"} & place.cycle(judge, TRAINING).figures["train"].keys()
