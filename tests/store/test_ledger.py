"""Policies as the store moves them: the route turns with the move, and one policy at a time is tested."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from art_patch.errors import ConfigError, StoreError, TransitionError
from art_patch.store import Store, read_route
from art_patch.types import Group, Route
from tests.support.postgres import Execute
from tests.support.store_samples import info, policy


@pytest.fixture
def place(store: Store) -> Store:
    """agent@0 serves, three candidates wait."""
    store.ledger.add_base("agent@0", "/base", "ff", who="test", now=0.0)
    for step in (1, 2, 3):
        store.ledger.add_candidate(policy(step), trained_on=[], who="test")
    return store


def states(store: Store) -> list[str]:
    return [policy.state for policy in store.ledger.policies()]


def moves(store: Store, limit: int) -> list[tuple[Any, ...]]:
    return [(m["policy"], m["from_state"], m["to_state"], m["reason"]) for m in store.ledger.history(limit=limit)]


def canary(name: str, percent: float = 5.0, since: float = 7.0, champion: str = "agent@0") -> Route:
    return Route(
        champion=champion,
        challenger=name,
        challenger_state="canary",
        challenger_percent=percent,
        challenger_since=since,
    )


def test_a_shadow_becomes_a_canary_becomes_champion(place: Store, url: str):
    ledger = place.ledger
    assert ledger.challenger() is None
    ledger.move("agent@1", "shadow", who="me", reason="look", metrics={"gate": 1}, now=5.0)
    assert read_route(url) == Route(
        champion="agent@0", challenger="agent@1", challenger_state="shadow", challenger_since=5.0
    )
    challenger = ledger.move("agent@1", "canary", who="me", reason="try", metrics={"shadow": 2}, percent=5, now=7.0)
    assert ledger.challenger() == challenger == ledger.policy("agent@1")
    assert (challenger.state, challenger.metrics) == ("canary", {"gate": 1, "shadow": 2})
    assert read_route(url) == canary("agent@1")
    ledger.move("agent@1", "champion", who="me", reason="won", now=9.0)
    assert read_route(url) == Route(champion="agent@1")
    assert states(place) == ["retired", "champion", "candidate", "candidate"]
    assert moves(place, 4) == [
        ("agent@0", "champion", "retired", "replaced by agent@1"),
        ("agent@1", "canary", "champion", "won"),
        ("agent@1", "shadow", "canary", "try"),
        ("agent@1", "candidate", "shadow", "look"),
    ]
    share = {"percent_before": None, "percent": 5}
    assert [m["metrics"] for m in ledger.history(limit=3)] == [{}, {}, {"shadow": 2} | share]
    assert place.verify() == []


def test_a_canarys_share_changes_and_its_test_goes_on(place: Store, url: str):
    ledger = place.ledger
    ledger.move("agent@1", "canary", who="me", reason="try", metrics={"gate": 1}, percent=5, now=7.0)
    wider = ledger.move("agent@1", "canary", who="you", reason="looks good", percent=20.5, now=9.0)
    assert (wider.state, wider.metrics) == ("canary", {"gate": 1})
    assert read_route(url) == canary("agent@1", 20.5, since=7.0)
    ledger.move("agent@1", "canary", who="me", reason="too many", percent=1, now=11.0)
    assert read_route(url) == canary("agent@1", 1.0, since=7.0)
    with pytest.raises(TransitionError, match="answers 1 % of the sessions already"):
        ledger.move("agent@1", "canary", who="me", reason="again", percent=1, now=12.0)
    with pytest.raises(ConfigError, match="up to 100"):
        ledger.move("agent@1", "canary", who="me", reason="all", percent=101, now=12.0)
    rows = [(m["who"], m["at"], m["reason"], m["metrics"]) for m in ledger.history(limit=2)]
    assert rows == [
        ("me", 11.0, "too many", {"percent_before": 20.5, "percent": 1}),
        ("you", 9.0, "looks good", {"percent_before": 5, "percent": 20.5}),
    ]
    assert moves(place, 1) == [("agent@1", "canary", "canary", "too many")]
    traffic = place.evidence.arm_traffic(challenger="agent@1", champion="agent@0", state="canary", since=7.0)
    assert traffic.shares == ((7.0, 5), (9.0, 20.5), (11.0, 1))
    assert place.verify() == []


def test_a_rejected_challenger_leaves_the_route(place: Store, url: str):
    place.ledger.move("agent@2", "canary", who="me", reason="try", percent=100, now=7.0)
    place.ledger.move("agent@1", "rejected", who="me", reason="another one")
    assert read_route(url) == canary("agent@2", 100.0)
    place.ledger.move("agent@2", "rejected", who="me", reason="worse", metrics={"p": 0.01})
    assert read_route(url) == Route(champion="agent@0")
    assert place.ledger.challenger() is None
    with pytest.raises(TransitionError, match="stays that way"):
        place.ledger.move("agent@2", "canary", who="me", reason="again", percent=5)
    place.ledger.move("agent@3", "shadow", who="me", reason="next")
    assert states(place) == ["champion", "rejected", "rejected", "shadow"]


def test_one_policy_at_a_time_is_tested(place: Store, url: str):
    place.ledger.move("agent@1", "canary", who="me", reason="try", percent=5, now=7.0)
    before = states(place), moves(place, 50)
    for state, percent in (("shadow", None), ("canary", 5.0)):
        with pytest.raises(TransitionError, match="agent@1 is canary already, and one policy is tested at a time"):
            place.ledger.move("agent@2", state, who="me", reason="too", percent=percent)  # type: ignore[arg-type]
    assert (states(place), moves(place, 50)) == before
    assert read_route(url) == canary("agent@1")


def test_another_champion_ends_the_test(place: Store, url: str):
    place.ledger.move("agent@1", "canary", who="me", reason="try", percent=5)
    place.ledger.move("agent@3", "champion", who="me", reason="by hand")
    assert read_route(url) == Route(champion="agent@3")
    assert moves(place, 3) == [
        ("agent@1", "canary", "rejected", "the champion changed while it was tested"),
        ("agent@0", "champion", "retired", "replaced by agent@3"),
        ("agent@3", "candidate", "champion", "by hand"),
    ]
    place.ledger.move("agent@2", "shadow", who="me", reason="look")
    place.ledger.move("agent@0", "champion", who="me", reason="rolled back")
    assert states(place) == ["champion", "rejected", "rejected", "retired"]
    assert read_route(url) == Route(champion="agent@0")
    assert place.verify() == []


@pytest.mark.parametrize(
    ("state", "percent", "words"),
    [
        ("canary", None, "not None"),
        ("canary", 0.0, "above 0"),
        ("canary", 100.5, "up to 100"),
        ("canary", float("nan"), "not nan"),
        ("shadow", 5.0, "goes with a canary only"),
        ("champion", 5.0, "goes with a canary only"),
    ],
)
def test_only_a_canary_has_a_share(place: Store, state: str, percent: float | None, words: str):
    with pytest.raises(ConfigError, match=words):
        place.ledger.move("agent@1", state, who="me", reason="x", percent=percent)  # type: ignore[arg-type]
    assert states(place) == ["champion", "candidate", "candidate", "candidate"]


def test_nothing_is_tested_where_nothing_serves(store: Store):
    store.ledger.add_candidate(policy(1), trained_on=[], who="test")
    with pytest.raises(TransitionError, match="no champion serves that agent@1 could be tested against"):
        store.ledger.move("agent@1", "shadow", who="me", reason="x")


def test_an_engine_that_comes_and_goes_leaves_the_challenger(place: Store, url: str):
    place.ledger.move("agent@1", "canary", who="me", reason="try", percent=5, now=7.0)
    place.ledger.set_engine("http://127.0.0.1:1/v1", who="test", now=8.0)
    place.ledger.set_engine(None, who="test", now=9.0)
    found = read_route(url)
    assert (found.challenger, found.challenger_percent, found.base_url) == ("agent@1", 5.0, None)


def test_a_route_of_an_older_release_is_read_and_kept(place: Store, url: str, execute: Execute):
    old = {"champion": "agent@0", "base_url": "http://127.0.0.1:1/v1", "key_file": None, "engine_since": 4.0}
    execute(f"UPDATE control SET value = '{json.dumps(old)}' WHERE key = 'route'")
    assert read_route(url) == Route(champion="agent@0", base_url="http://127.0.0.1:1/v1", engine_since=4.0)
    place.ledger.move("agent@1", "shadow", who="me", reason="look", now=5.0)
    found = read_route(url)
    assert (found.challenger, found.base_url, found.engine_since) == ("agent@1", old["base_url"], 4.0)


@pytest.mark.parametrize("state", ["shadow", "canary"])
@pytest.mark.parametrize("end", ["lost", "overtaken", "rejected"])
def test_what_was_retired_may_be_tested_again(place: Store, execute: Execute, state: Any, end: str):
    """It keeps what it learned, and stays one that can be gone back to, unless it is rejected by name."""
    keep_groups(place, "a")
    place.ledger.add_candidate(policy(4), trained_on=["a"], who="test")
    for name in ("agent@4", "agent@1"):
        place.ledger.move(name, "champion", who="me", reason="won")
    place.ledger.move("agent@4", state, who="me", reason="again", percent=5.0 if state == "canary" else None)
    assert place.ledger.after_test("agent@4") == "retired"
    if end == "lost":
        assert place.ledger.end_test("agent@4", who="me", reason="no better").state == "retired"
    elif end == "overtaken":
        place.ledger.move("agent@0", "champion", who="me", reason="rolled back")
    else:
        place.ledger.move("agent@4", "rejected", who="me", reason="leaks")
    found = place.ledger.policy("agent@4")
    assert found is not None and found.state == ("rejected" if end == "rejected" else "retired")
    assert [row[:3] for row in groups_of(execute)] == [("a", "trained", "agent@4")]
    assert place.ledger.route().challenger is None
    assert place.verify() == []


def test_what_is_retired_may_be_rejected_for_good(place: Store):
    place.ledger.move("agent@1", "champion", who="me", reason="won")
    place.ledger.move("agent@0", "rejected", who="me", reason="leaks")
    with pytest.raises(StoreError, match="art-patch"):
        place.ledger.move("agent@9", "rejected", who="me", reason="x")
    assert states(place)[:2] == ["rejected", "champion"]


def groups_of(execute: Execute) -> list[tuple[Any, ...]]:
    return execute("SELECT id, state, policy, reason FROM groups ORDER BY id")


def keep_groups(store: Store, *keys: str) -> None:
    """Scored groups of two runs each."""
    for key in keys:
        store.write([info(f"{key}-{n}") for n in range(2)])
        runs = store.read.trajectories([f"{key}-0", f"{key}-1"])
        store.ledger.add_groups([Group(key, f"task:{key}", "same_task", runs)], state="scored", now=1.0)


@pytest.mark.parametrize("state", ["candidate", "shadow", "canary"])
def test_a_policy_that_is_rejected_gives_its_groups_back(place: Store, execute: Execute, state: str):
    keep_groups(place, "a", "b", "c")
    place.ledger.add_candidate(policy(4), trained_on=["a", "b"], also=["elsewhere"], who="test")
    if state != "candidate":
        percent = 5.0 if state == "canary" else None
        place.ledger.move("agent@4", state, who="me", reason="try", percent=percent)  # type: ignore[arg-type]
    lineage = execute("SELECT * FROM trainings ORDER BY policy, group_id")
    place.ledger.move("agent@4", "rejected", who="me", reason="worse")
    assert groups_of(execute) == [
        ("a", "scored", None, "agent@4 was rejected"),
        ("b", "scored", None, "agent@4 was rejected"),
        ("c", "scored", None, None),
    ]
    assert execute("SELECT * FROM trainings ORDER BY policy, group_id") == lineage
    erasure = place.rights.erase(trajectory="a-0", who="me")
    assert [(one.name, one.state, one.how) for one in erasure.policies] == [("agent@4", "rejected", "trained")]
    assert place.verify() == []


def test_a_group_comes_back_until_three_candidates_that_learned_from_it_were_rejected(place: Store, execute: Execute):
    keep_groups(place, "a", "b")
    for step, trained_on in ((4, ["a"]), (5, ["a", "b"]), (6, ["a", "b"])):
        place.ledger.add_candidate(policy(step), trained_on=trained_on, who="test")
        place.ledger.move(f"agent@{step}", "rejected", who="me", reason="worse")
    assert groups_of(execute) == [
        ("a", "stale", None, "3 candidates that learned from it were rejected"),
        ("b", "scored", None, "agent@6 was rejected"),
    ]


def test_what_a_policy_learned_that_serves_or_served_stays_trained(place: Store, execute: Execute):
    keep_groups(place, "a", "b", "c")
    move = partial(place.ledger.move, who="me", reason="x")
    place.ledger.add_candidate(policy(4), trained_on=["a"], who="test")
    move("agent@4", "champion")
    place.ledger.add_candidate(policy(5), trained_on=["a", "b"], who="test")  # a script may give a group twice
    place.ledger.add_candidate(policy(6), trained_on=["b", "c"], who="test")
    move("agent@5", "rejected")
    assert [row[:2] for row in groups_of(execute)] == [("a", "trained"), ("b", "trained"), ("c", "trained")]
    move("agent@0", "champion")  # gone back: agent@4 is retired
    move("agent@4", "rejected")  # and never comes again, but others may go on from it
    move("agent@6", "rejected")
    assert [row[:2] for row in groups_of(execute)] == [("a", "trained"), ("b", "scored"), ("c", "scored")]
    assert place.verify() == []


def test_a_challenger_that_is_overtaken_gives_back_what_the_new_champion_did_not_learn(place: Store, execute: Execute):
    keep_groups(place, "a", "b")
    place.ledger.add_candidate(policy(4), trained_on=["a", "b"], who="test")
    place.ledger.add_candidate(policy(5), trained_on=["b"], who="test")
    place.ledger.move("agent@4", "canary", who="me", reason="try", percent=5)
    place.ledger.move("agent@5", "champion", who="me", reason="by hand")
    assert [row[:2] for row in groups_of(execute)] == [("a", "scored"), ("b", "trained")]


def test_what_was_erased_meanwhile_does_not_come_back(place: Store, execute: Execute):
    keep_groups(place, "a", "b", "c")
    place.ledger.add_candidate(policy(4), trained_on=["a", "b", "c"], who="test")
    for gone in ("a-0", "a-1", "b-0"):
        place.rights.erase(trajectory=gone, who="me")
    place.ledger.move("agent@4", "rejected", who="me", reason="worse")
    assert groups_of(execute) == [
        ("b", "dead", None, "fewer than two of its runs are left"),
        ("c", "scored", None, "agent@4 was rejected"),
    ]
    assert place.verify() == []


def test_two_challengers_are_found_out(place: Store, execute: Execute):
    execute("UPDATE policies SET state = 'canary' WHERE name IN ('agent@1', 'agent@2')")
    assert place.verify() == ["2 challengers: agent@1, agent@2"]
