"""Which policy an update starts from, and which champion a candidate is tested against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.pipeline.lineage import distances_to, marks, rival_of, start_of
from art_patch.rewards import Judge
from art_patch.types import Policy
from tests.support.cycles import TRAINING, Place, eager, reward

PROMISING: dict[str, Any] = {"gate": {"seems_better": True, "may_be_continued": True}}
TOO_FAR: dict[str, Any] = {"gate": {"seems_better": True, "may_be_continued": False}}


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    def make(step: int, parent: int | None, state: Any = "rejected", **changes: Any) -> Policy:
        directory = tmp_path / str(step)
        directory.mkdir(exist_ok=True)
        name = None if parent is None else f"agent@{parent}"
        policy = Policy(f"agent@{step}", "base", "sha", state, float(step), str(directory), name, PROMISING)
        return replace(policy, **changes)

    return make


def names(found: tuple[Policy, tuple[Policy, ...]]) -> tuple[str, list[str]]:
    return found[0].name, [each.name for each in found[1]]


def test_the_newest_that_seemed_better_is_continued(policy: Any):
    base, one, two = policy(0, None, "champion"), policy(1, 0), policy(2, 1)
    assert names(start_of([base], base, "candidate")) == ("agent@0", [])
    assert names(start_of([base, one], base, "candidate")) == ("agent@1", [])
    assert names(start_of([base, one, two], base, "candidate")) == ("agent@2", [])
    anew = policy(3, 0)  # of another line
    assert names(start_of([base, one, two, anew], base, "candidate")) == ("agent@3", ["agent@1", "agent@2"])


def test_of_one_that_is_too_far_the_one_before_is_continued(policy: Any):
    base, one, far = policy(0, None, "champion"), policy(1, 0), policy(2, 1, metrics=TOO_FAR)
    assert names(start_of([base, one, far], base, "candidate")) == ("agent@1", [])
    assert names(start_of([base, policy(1, 0, metrics=TOO_FAR)], base, "candidate")) == ("agent@0", [])
    for rows, is_near in (
        ({}, True),
        ({"far_rows": 1, "trained_rows": 4}, True),
        ({"far_rows": 1, "trained_rows": 3}, False),
    ):
        told = marks(policy(3, 1, metrics={"train": rows}), seems_better=True)
        assert told == {"seems_better": True, "may_be_continued": is_near}
    assert marks(one, seems_better=False) == {}


def test_what_went_wrong_ends_the_line(policy: Any):
    base, one = policy(0, None, "champion"), policy(1, 0)
    for worse in (
        policy(2, 1, metrics={"gate": {}}),  # it did not seem better
        policy(2, 1, "retired"),  # it served, and was rolled back
        policy(2, 0, metrics={}),  # by hand, or by its canary test
    ):
        assert names(start_of([base, one, worse], base, "candidate")) == ("agent@0", ["agent@1"])
    for lost in (replace(one, path=None), replace(one, path=one.path + "x")):
        assert names(start_of([base, lost], base, "candidate")) == ("agent@0", ["agent@1"])


def test_another_champion_or_setting_starts_elsewhere(policy: Any):
    base, one, two = policy(0, None, "retired"), policy(1, 0), policy(2, 1, "champion")
    assert names(start_of([base, one, two], two, "candidate")) == ("agent@2", [])
    assert names(start_of([base, one], base, "champion")) == ("agent@0", ["agent@1"])
    anew, given_up = start_of([base, one, two, policy(3, 2)], two, "base")
    assert (anew.name, anew.path, [each.name for each in given_up]) == ("agent@0", None, ["agent@3"])


def test_a_candidate_is_rival_of_the_champion_that_its_line_began_with(policy: Any):
    base, one, two = policy(0, None, "champion"), policy(1, 0), policy(2, 1, "candidate")
    known = {each.name: each for each in (base, one, two)}
    assert rival_of(two, known) == "agent@0"
    assert rival_of(replace(two, parent="agent@7"), known) == "agent@7"
    known["agent@1"] = replace(one, metrics={})
    assert rival_of(two, known) == "agent@1"
    assert rival_of(base, known) is None


def test_distance_goes_along_the_line_of_both(policy: Any):
    base, one, two, other = policy(0, None), policy(1, 0), policy(2, 1), policy(3, 0)
    stranger = policy(4, None)
    found = distances_to(two, [base, one, two, other, stranger])
    assert found == {"agent@0": 2, "agent@1": 1, "agent@2": 0, "agent@3": 3}


@pytest.mark.slow
def test_a_cycle_continues_what_its_gate_could_not_prove(place: Place, judge: Judge):
    # The only user is too few for the gate, which finds the candidate better for this one.
    place.traffic(user="u")
    reward(place)
    one_user = replace(TRAINING, gate=replace(TRAINING.gate, min_users=2))
    first = place.cycle(judge, one_user)
    assert (first.outcome, place.states()["agent@1"]) == ("rejected", "rejected")
    assert first.reason.endswith("it seems better, so updates go on from there")
    learned = place.store.read.groups(state="trained")
    assert learned and place.store.read.groups(state="scored") == ()  # it goes on, so it keeps what it learned from

    place.traffic(user="u", seed=1)
    reward(place)
    second = place.cycle(judge, eager(one_user))
    assert second.metrics["train"]["start"] == "agent@1"
    assert second.metrics["train"]["groups"] == len(learned)
    policy = place.store.ledger.policy("agent@2")
    assert policy is not None and policy.parent == "agent@1"
    assert (place.champion, second.champion) == ("agent@0", "agent@0")  # it was compared with who serves

    # Once the setting says so, its update begins at the champion, with all that was learned from in vain.
    place.traffic(user="u", seed=2)
    reward(place)
    third = place.cycle(judge, replace(one_user, train=replace(one_user.train, start="champion")))
    assert third.metrics["train"]["start"] == "agent@0"
    assert third.metrics["train"]["groups"] == 3 * len(learned)
    policy = place.store.ledger.policy("agent@3")
    assert policy is not None and policy.parent == "agent@0"
