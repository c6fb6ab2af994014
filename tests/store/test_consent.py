"""Whose runs are learned from: what the app said of a run, and what a user said of all of theirs."""

from __future__ import annotations

import pytest

from art_patch.store import Store
from art_patch.types import Call, Correction, Group, Score, Trajectory, TrajectoryInfo
from tests.support.store_samples import call, info

EVERY = 1e9


def runs(store: Store, *keys: str, **about: object) -> None:
    for key in keys:
        store.write([info(key, **about), call(f"{key}-c", key)])


def grouped(store: Store, key: str, *members: str, held_out: bool = False, state: str = "formed") -> None:
    siblings = tuple(Trajectory(info(member), ()) for member in members)
    store.ledger.add_groups([Group(key, f"task {key}", "same_task", siblings, held_out)], state=state, now=1.0)


def ungrouped(store: Store) -> list[str]:
    return sorted(run.id for run in store.read.ungrouped(settled_before=EVERY))


def members(store: Store, key: str) -> list[str] | None:
    found = store.read.groups_of([key])
    return [run.id for run in found[0].trajectories] if found else None


def test_what_the_app_said_is_kept_and_never_taken_back(store: Store):
    runs(store, "no", learn=False)
    runs(store, "yes")
    store.write([info("no", learn=True, ended_at=2.0), info("yes", ended_at=2.0)])
    no, yes = store.read.trajectories(["no", "yes"])
    assert (no.info.learn, yes.info.learn) == (False, True)
    assert (no.info.ended_at, ungrouped(store)) == (2.0, ["yes"])
    store.write([info("yes", learn=False)])
    assert (ungrouped(store), store.read.trajectories(["yes"])[0].info.learn) == ([], False)
    assert store.read.counts()["not_learned_from"] == {"the app said that nothing may be learned from it": 2}


def test_a_withdrawal_holds_for_past_and_future_runs_until_it_is_taken_back(store: Store):
    runs(store, "a", "b", user_id="u1")
    runs(store, "c", user_id="u2")
    runs(store, "d")
    assert store.consent.withdraw("u1", who="test", now=5.0)
    assert not store.consent.withdraw("u1", who="test", now=6.0)
    assert (ungrouped(store), store.consent.withdrawn()) == (["c", "d"], {"u1": 5.0})
    runs(store, "e", user_id="u1")
    assert ungrouped(store) == ["c", "d"]
    assert store.consent.left_out() == {"its user withdrew": 3}
    assert store.consent.learned_from(["a", "c", "d", "nobody"]) == {"c", "d"}
    assert store.consent.give("u1", who="test")
    assert not store.consent.give("u1", who="test")
    assert ungrouped(store) == ["a", "b", "c", "d", "e"]
    assert (store.consent.left_out(), store.consent.withdrawn()) == ({}, {})
    assert store.verify() == []


def test_groups_lose_such_members_and_one_that_is_too_small_is_left_out(store: Store):
    runs(store, "a", "b", "d", user_id="u2")
    runs(store, "c", "e", "f", user_id="u1")
    grouped(store, "three", "a", "b", "c")
    grouped(store, "two", "d", "e")
    grouped(store, "test", "f", held_out=True)
    store.consent.withdraw("u1", who="test")
    assert (members(store, "three"), members(store, "two"), members(store, "test")) == (["a", "b"], None, None)
    assert [group.id for group in store.read.groups(state="formed")] == ["three"]
    store.consent.give("u1", who="test")
    assert (members(store, "two"), members(store, "test")) == (["d", "e"], ["f"])


def test_corrections_and_rewards_of_such_runs_teach_nothing(store: Store):
    runs(store, "a", user_id="u1")
    runs(store, "b", learn=False)
    runs(store, "c")
    for key in "abc":
        right = Correction(f"{key}-r", key, 3.0, "user", {"role": "assistant", "content": "x"})
        store.write([right, Score(f"{key}-s", key, "reward", 1.0, "user", 3.0)])
    store.consent.withdraw("u1", who="test")
    assert store.evidence.corrected(since=0.0, limit=10) == ("c",)
    assert store.evidence.rewarded_alone(since=0.0, limit=10) == ("c",)


def test_what_people_said_of_such_runs_is_not_compared_with_the_judge(store: Store):
    for key, user in (("a", "u1"), ("b", "u2")):
        runs(store, key, f"{key}2", user_id=user)
        grouped(store, f"g-{key}", key, f"{key}2", state="scored")
        store.write([Score(f"{key}-s", key, "thumbs", 1.0, "user", 3.0)])
    store.consent.withdraw("u1", who="test")
    assert [group.id for group in store.evidence.opinions(["thumbs"])] == ["g-b"]


@pytest.mark.parametrize("kind", ["resampled", "replayed"])
def test_copies_that_were_made_before_the_app_said_so_follow_their_original(store: Store, kind: str):
    from art_patch._lib.ids import replay_id

    asked: dict[str, object] = {"metadata": {"replay": None}} if kind == "replayed" else {}
    runs(store, "a", **asked)
    runs(store, "other")
    copies = [replay_id("a", 1), replay_id("a", 2)] if kind == "replayed" else ["k1", "k2"]
    for copy in copies:
        origin = "explicit" if kind == "replayed" else "resampled"
        shadow_of = None if kind == "replayed" else "a-c"
        made: Call = call(f"{copy}-c", copy, at=2.0, shadow_of=shadow_of)
        store.write([TrajectoryInfo(copy, 2.0, origin), made])
    grouped(store, "source", "a", state="resampled")
    grouped(store, "copies", *copies, state="scored")
    assert store.consent.spread() == 0
    store.write([info("a", learn=False)])
    assert store.consent.spread() == 2
    assert (members(store, "copies"), store.consent.spread(), ungrouped(store)) == (None, 0, ["other"])


def test_a_withdrawal_is_in_the_audit_log_without_the_name_and_outlives_an_erasure(store: Store, execute):
    runs(store, "a", user_id="carol@example.com")
    store.consent.withdraw("carol@example.com", who="test")
    store.rights.erase(user="carol@example.com")
    assert "carol" not in repr(execute("SELECT detail FROM audit"))
    assert list(store.consent.withdrawn()) == ["carol@example.com"]
    assert store.verify() == []


def test_a_first_start_is_noted_once_for_each_command(store: Store):
    assert [store.consent.note_start(command) for command in ("serve", "retrain", "serve")] == [True, True, False]
