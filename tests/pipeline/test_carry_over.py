"""Which policy an update starts from, and which champion a candidate is tested against."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art_patch.errors import TrainingError
from art_patch.gate import Verdict
from art_patch.pipeline import train_policy
from art_patch.pipeline.carry_over import distances_to, marks, rival_of, start_of
from art_patch.pipeline.cycle_run import Cycle, CycleConfig
from art_patch.pipeline.promote_policy import act_on_verdict
from art_patch.rewards import Judge
from art_patch.store import open_store
from art_patch.types import Group, Policy, PolicyState, TrajectoryInfo
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
        told = marks(policy(3, 1, metrics={"train": rows}))
        assert told == {"seems_better": True, "may_be_continued": is_near}


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


def test_a_line_of_thousands_of_updates_is_measured(policy: Any):
    line = [replace(policy(0, None), name=f"agent@{n}", parent=f"agent@{n - 1}" if n else None) for n in range(2000)]
    assert distances_to(line[-1], line)["agent@0"] == 1999


def test_one_of_a_former_champion_is_given_up(policy: Any):
    base, one, other = policy(0, None, "retired"), policy(1, 0), policy(2, 0, "champion", metrics={})
    assert names(start_of([base, one, other], other, "candidate")) == ("agent@2", ["agent@1"])


def test_one_that_is_given_up_still_tells_whom_its_line_was_tested_against(policy: Any):
    given_up: dict[str, Any] = {"gate": {"seems_better": True, "may_be_continued": False}}
    base, one, two = policy(0, None, "champion"), policy(1, 0, metrics=given_up), policy(2, 1, "candidate", metrics={})
    assert rival_of(two, {each.name: each for each in (base, one, two)}) == "agent@0"


class Line:
    """A store whose candidates each learned from one group of their own, and a cycle on it that trains nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.store = directory, open_store(f"sqlite:///{directory}/store.db")
        self.store.ledger.add_base("agent@0", "base", "sha", who="test")
        nothing: Any = None
        self.run = Cycle(self.store, nothing, CycleConfig(), print, 100.0, nothing, directory / "adapters", "test")

    def learned(self, step: int, parent: int, *groups: str, state: PolicyState = "rejected", seems: bool = True) -> str:
        known = {each.name for each in self.store.ledger.policies()}
        name, path = f"agent@{step}", self.directory / "adapters" / f"agent@{step}"
        path.mkdir(parents=True)
        assert name not in known
        for key in groups:
            if not self.store.read.groups_of([key]):
                runs = [TrajectoryInfo(f"{key}-{n}", 1.0) for n in range(2)]
                self.store.write(runs)
                found = self.store.read.trajectories([run.id for run in runs])
                self.store.ledger.add_groups([Group(key, f"task {key}", "explicit", tuple(found))], state="scored")
        made = Policy(name, "base", "sha", "candidate", float(step) + 1e10, str(path), f"agent@{parent}")
        self.store.ledger.add_candidate(made, trained_on=groups, who="test")
        if state != "candidate":
            gate = {"gate": marks(made)} if state == "rejected" and seems else {}
            self.store.ledger.move(name, state, who="test", reason="", metrics=gate)
        return name

    def start(self, setting: Any = "candidate") -> str:
        champion = self.store.ledger.champion()
        assert champion is not None
        self.run.config = replace(CycleConfig(), train=replace(CycleConfig().train, start=setting))
        return train_policy._start(self.run, champion).name  # pyright: ignore[reportPrivateUsage]

    def scored(self) -> set[str]:
        return set(self.store.read.group_ids(state="scored"))


@pytest.fixture
def line(tmp_path: Path) -> Any:
    made = Line(tmp_path)
    yield made
    made.store.close()


def test_groups_of_one_that_was_given_up_are_not_given_back_twice(line: Line):
    line.learned(1, 0, "a")
    line.learned(2, 1, "b", seems=False)
    assert (line.start(), line.scored()) == ("agent@0", {"a", "b"})
    # The new line learned from the same groups, and goes on.
    line.learned(3, 0, "a", "b")
    assert (line.start(), line.scored()) == ("agent@3", set())


def test_one_that_was_given_up_is_never_continued(line: Line):
    line.learned(1, 0, "a")
    line.learned(2, 1, "b")
    assert (line.start("champion"), line.scored()) == ("agent@0", {"a", "b"})
    # Nothing was trained then. Its groups wait: one that went on from it would learn from them twice.
    assert (line.start(), line.scored()) == ("agent@0", {"a", "b"})


def test_what_one_that_served_grew_from_keeps_its_groups(line: Line):
    line.learned(1, 0, "a")
    grown = line.learned(2, 1, "b", state="champion")
    line.store.ledger.move("agent@0", "champion", who="test", reason="a rollback")
    assert (line.start(), line.scored()) == ("agent@0", set())
    line.store.ledger.move(grown, "champion", who="test", reason="it was right after all")
    assert (line.start(), line.scored()) == (grown, set())


def test_what_a_candidate_that_waits_grew_from_keeps_its_groups(line: Line):
    line.learned(1, 0, "a")
    waits = line.learned(2, 1, "b", state="candidate")
    assert (line.start(), line.scored()) == ("agent@0", set())
    line.store.ledger.move(waits, "rejected", who="test", reason="by hand")
    assert (line.start(), line.scored()) == ("agent@0", {"a", "b"})


def test_groups_of_one_whose_champion_was_replaced_come_back(line: Line):
    line.learned(1, 0, "a")
    other = line.learned(2, 0, "b", state="champion")
    assert (line.start(), line.scored()) == (other, {"a"})


@pytest.mark.parametrize("is_near", [True, False])
def test_the_reason_says_where_updates_go_on(line: Line, is_near: bool):
    name = line.learned(1, 0, state="candidate")
    champion, candidate = line.store.ledger.champion(), line.store.ledger.policy(name)
    assert champion is not None and candidate is not None
    candidate = replace(candidate, metrics={"train": {"far_rows": 0 if is_near else 1, "trained_rows": 1}})
    with suppress(AttributeError):  # it is rejected; there is no engine to unload it from
        act_on_verdict(line.run, candidate, champion, Verdict(False, "not proven", {}, seems_better=True))
    said = line.store.ledger.history(limit=1)[0]["reason"]
    assert said.endswith("; it seems better, so updates go on from there") is is_near
    assert said.startswith("not proven") and (is_near or said.endswith("updates go on from before it"))


@pytest.mark.parametrize("left", [True, False])
def test_an_update_that_is_dropped_ends_the_line(line: Line, monkeypatch: pytest.MonkeyPatch, left: bool):
    line.learned(1, 0, "a")
    champion = line.store.ledger.champion()
    assert champion is not None
    target = line.directory / "adapters" / "agent@2"
    job: Any = SimpleNamespace(target=target, fingerprint="f" * 64, metrics={"start": "agent@1"})
    line.run.metrics["train"] = job.metrics

    def fails(job: Any, directory: Path, **_: Any) -> None:
        if left:  # a full disk, say: the next cycle goes on from there
            directory.mkdir(parents=True)
        raise TrainingError("nothing is near enough; nothing was trained or published")

    monkeypatch.setattr(train_policy.training, "run_job", fails)
    with pytest.raises(TrainingError):
        train_policy.run_job(line.run, champion, job)
    # All that the champion answers would be too far from it in every later cycle.
    assert (line.start(), line.scored()) == (("agent@1", set()) if left else ("agent@0", {"a"}))


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
