"""Upstream as the champion in the ledger: what learns beside it, and how it comes to serve and leaves again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from art_patch.errors import TransitionError
from art_patch.pipeline import why_none_serves
from art_patch.store import Store, read_route
from art_patch.types import Route
from tests.support.store_samples import call, info, policy


@pytest.fixture
def place(store: Store) -> Store:
    """agent@0 learns, two candidates wait."""
    store.ledger.add_base("agent@0", "/base", "ff", who="test", upstream_answers=True, now=0.0)
    store.ledger.add_candidate(policy(1), trained_on=[], who="test")
    store.ledger.add_candidate(replace(policy(2), parent="agent@1"), trained_on=[], who="test")
    return store


def move(store: Store, name: str, state: Any, **how: Any) -> None:
    store.ledger.move(name, state, who="me", reason="test", now=5.0, **how)


def states(store: Store) -> dict[str, str]:
    return {each.name: each.state for each in store.ledger.policies()}


def test_a_base_learns_where_upstream_answers_and_a_restart_changes_nothing(place: Store, url: str):
    for upstream_answers in (True, False):
        again = place.ledger.add_base("agent@0", "/base", "ff", who="me", upstream_answers=upstream_answers)
        assert again.state == "learner"
    assert read_route(url) == Route(learner="agent@0")
    assert place.ledger.champion() is None
    assert place.ledger.learner() == place.ledger.leader() == place.ledger.policy("agent@0")
    assert place.ledger.history(limit=4)[2]["reason"] == "upstream answers; it learns until it has proven itself"


def test_what_upstream_has_answered(store: Store):
    store.write([info("t1"), call("ours", "t1", 1.0, policy="agent@0"), call("failed", "t1", 2.0, status="error")])
    store.write([call("copy", "t1", 3.0, policy=None, shadow_of="ours")])
    assert not store.read.upstream_answers()
    store.write([call("theirs", "t1", 4.0, policy=None)])
    assert store.read.upstream_answers()


def test_a_better_learner_replaces_the_one_before(place: Store, url: str):
    move(place, "agent@1", "learner")
    assert states(place) == {"agent@0": "retired", "agent@1": "learner", "agent@2": "candidate"}
    assert read_route(url) == Route(learner="agent@1")


def test_a_canary_beside_upstream_serves_if_it_wins_and_learns_on_if_not(place: Store, url: str):
    move(place, "agent@0", "canary", percent=5)
    assert read_route(url) == Route(
        challenger="agent@0", challenger_state="canary", challenger_percent=5, challenger_since=5.0
    )
    assert (place.ledger.learner(), place.ledger.leader()) == (None, place.ledger.policy("agent@0"))
    move(place, "agent@0", "learner")
    assert read_route(url) == Route(learner="agent@0")
    move(place, "agent@0", "canary", percent=5)
    move(place, "agent@0", "champion")
    assert read_route(url) == Route(champion="agent@0")
    assert place.ledger.replaced_upstream("agent@0")
    move(place, "agent@0", "learner")
    assert read_route(url) == Route(learner="agent@0")


def test_a_shadow_beside_upstream_is_refused_and_so_is_a_learner_beside_a_champion(place: Store):
    with pytest.raises(TransitionError, match="no champion serves that agent@1 could be tested against"):
        move(place, "agent@1", "shadow")
    move(place, "agent@0", "champion")
    with pytest.raises(TransitionError, match="agent@0 serves, so agent@1 cannot become the learner"):
        move(place, "agent@1", "learner")


def test_a_rejected_learner_leaves_the_learning_to_its_parent(place: Store, url: str):
    move(place, "agent@1", "learner")
    move(place, "agent@2", "learner")
    move(place, "agent@2", "canary", percent=5)
    move(place, "agent@2", "rejected")
    assert states(place) == {"agent@0": "retired", "agent@1": "learner", "agent@2": "rejected"}
    assert read_route(url) == Route(learner="agent@1")
    assert place.ledger.history(limit=1)[0]["reason"] == "agent@2 was rejected"
    move(place, "agent@1", "rejected")
    move(place, "agent@0", "rejected")
    assert read_route(url) == Route()


def test_a_candidate_that_is_tested_by_hand_leaves_the_learner_alone(place: Store):
    move(place, "agent@1", "canary", percent=5)
    move(place, "agent@1", "rejected")
    assert states(place) == {"agent@0": "learner", "agent@1": "rejected", "agent@2": "candidate"}


def test_a_champion_that_took_over_did_not_replace_upstream(store: Store):
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    assert not store.ledger.replaced_upstream("agent@0")
    store.ledger.add_candidate(policy(1), trained_on=[], who="test")
    move(store, "agent@1", "canary", percent=5)
    move(store, "agent@1", "champion")
    assert not store.ledger.replaced_upstream("agent@1")


def test_upstream_was_the_champion_before_a_policy_that_was_promoted_beside_it_by_hand(place: Store):
    """However it came to serve, and also after a rollback to it."""
    move(place, "agent@1", "champion")
    assert place.ledger.replaced_upstream("agent@1")
    move(place, "agent@2", "champion")
    assert not place.ledger.replaced_upstream("agent@2")
    move(place, "agent@1", "champion")
    assert place.ledger.replaced_upstream("agent@1")
    move(place, "agent@2", "champion")
    move(place, "agent@1", "rejected")
    assert place.ledger.replaced_upstream("agent@2")


def test_a_canary_of_a_candidate_replaces_upstream_too(place: Store):
    move(place, "agent@1", "canary", percent=5)
    move(place, "agent@1", "champion")
    assert place.ledger.replaced_upstream("agent@1")


def test_a_policy_that_took_over_and_was_worse_is_behind_upstream_when_it_serves_again(store: Store):
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    move(store, "agent@0", "learner")
    move(store, "agent@0", "champion")
    assert store.ledger.replaced_upstream("agent@0")


def test_a_test_beside_upstream_goes_on_when_another_policy_becomes_the_learner(place: Store, url: str):
    move(place, "agent@2", "canary", percent=5)
    move(place, "agent@1", "learner")
    move(place, "agent@1", "rejected")
    assert states(place) == {"agent@0": "learner", "agent@1": "rejected", "agent@2": "canary"}
    assert read_route(url) == Route(
        learner="agent@0", challenger="agent@2", challenger_state="canary", challenger_percent=5, challenger_since=5.0
    )


def test_a_rejected_learner_without_a_parent_leaves_the_learning_to_the_base(place: Store):
    place.ledger.add_candidate(replace(policy(3), parent=None), trained_on=[], who="test")
    move(place, "agent@3", "learner")
    move(place, "agent@3", "rejected")
    assert states(place) | {"agent@0": "learner", "agent@3": "rejected"} == states(place)


def test_where_all_were_rejected_nobody_is_told_to_start_a_server_that_changes_nothing(place: Store):
    for name in ("agent@2", "agent@1", "agent@0"):
        move(place, name, "rejected")
    place.ledger.add_base("agent@0", "/base", "ff", who="test", upstream_answers=True)
    assert place.ledger.leader() is None
    assert "`art-patch serve --name NEW` begins anew" in why_none_serves(place)
    assert place.ledger.add_base("new@0", "/base", "ff", who="test", upstream_answers=True).state == "learner"


def test_two_people_who_end_a_test_at_once_reject_nothing(place: Store):
    """The second one has read the same test, and a learner may be rejected."""
    move(place, "agent@0", "canary", percent=5)
    assert place.ledger.end_test("agent@0", who="ada", reason="worse").state == "learner"
    with pytest.raises(TransitionError, match="agent@0 is learner, and no test of it is running"):
        place.ledger.end_test("agent@0", who="bob", reason="worse")
    assert states(place)["agent@0"] == "learner"


def test_the_control_group_begins_with_its_champion_or_not_at_all(store: Store):
    store.ledger.add_base("agent@0", "base", "0" * 64, who="test", upstream_answers=True)
    move = store.ledger.move
    with pytest.raises(TransitionError, match="was canary"):
        move("agent@0", "champion", who="server", reason="won", was="canary", control_percent=5.0)
    assert store.ledger.route().control_percent == 0.0
    move("agent@0", "champion", who="server", reason="won", was="learner", control_percent=5.0)
    assert (store.ledger.route().champion, store.ledger.route().control_percent) == ("agent@0", 5.0)
    store.ledger.set_control_group(0, who="ada")
    move("agent@0", "learner", who="ada", reason="back")
    move("agent@0", "champion", who="server", reason="won", control_percent=5.0)
    assert store.ledger.route().control_percent == 0.0, "a share that was set stays"
