"""Which calls and scores a control group compares, over both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from art_patch.errors import ConfigError
from art_patch.promotion import evidence_of
from art_patch.store import Store
from art_patch.store.queries.evidence import CONTROL_S
from art_patch.types import ENGINE_FULL, LEFT_ALONE, REFUSED, REPLAY_OF, UNREACHABLE, UPSTREAM_ARM, Policy, Score
from tests.support.store_samples import call, info

OLD, NEW = "agent@0", "agent@1"
SHA = "0" * 64


@pytest.fixture
def serving(store: Store) -> Store:
    """A champion since second 100, with 5 % of the sessions for the control group since second 50."""
    store.ledger.add_base(OLD, "base", SHA, who="test", now=100.0)
    store.ledger.set_control_group(5, who="test", now=50.0)
    return store


def test_the_champions_calls_and_the_control_groups_since_the_promotion(serving: Store):
    serving.write([
        info("t1", session_id="visit"), info("t2"), info("t3", session_id="kept"), info("t4"),
        call("before", "t4", 90.0, policy=OLD), call("goes on", "t4", 101.0, policy=OLD),
        call("ours", "t1", 102.0, policy=OLD),
        call("theirs", "t3", 103.0, policy=None, in_control_group=True),
        call("of no group", "t2", 104.0, policy=None),
        call("fell back", "t1", 105.0, policy=None, fallback="the engine did not answer in time"),
        call("full", "t1", 106.0, policy=None, fallback=ENGINE_FULL),
        call("down", "t1", 107.0, policy=None, fallback=UNREACHABLE),
        call("left alone", "t1", 108.0, policy=None, fallback=LEFT_ALONE),
        call("tested", "t1", 109.0, policy=None, fallback=f"{NEW}: the engine answered HTTP 500"),
        call("refused", "t1", 109.5, policy=None, fallback=REFUSED),
        call("copy", "t3", 110.0, policy=OLD, shadow_of="theirs"),
        replace(info("t5", metadata={REPLAY_OF: "t1"}), started_at=111.0), call("repeated", "t5", 111.0, policy=OLD),
    ])  # fmt: skip
    said = Score("s", "t3", "thumbs", 1.0, "user", 120.0)
    serving.write([said])
    found = serving.evidence.control_traffic(champion=OLD, now=200.0)
    assert [(each.id, each.policy, each.session, each.fell_back, each.down) for each in found.calls] == [
        ("ours", OLD, "visit", False, False),
        ("theirs", UPSTREAM_ARM, "kept", False, False),
        ("fell back", OLD, "visit", True, False),
        ("full", OLD, "visit", False, False),
        ("down", "", "visit", True, True),
        ("left alone", "", "visit", True, True),
        ("tested", NEW, "visit", False, False),
        ("refused", "", "visit", True, False),
    ]
    assert (found.scores, found.shares, found.is_whole) == ((said,), ((100.0, 95.0),), True)


def test_a_session_belongs_to_whom_its_first_call_was_meant_for_a_canary_included(serving: Store):
    serving.write([
        info("t1", session_id="tested"), info("t2", session_id="tested"),
        info("t3", session_id="ours"), info("t4", session_id="ours"), info("t5", session_id="ours"),
        call("by the canary", "t1", 110.0, policy=NEW), call("after its test", "t2", 120.0, policy=OLD),
        call("by the champion", "t3", 110.0, policy=OLD), call("in the test", "t4", 115.0, policy=NEW),
        call("failed in it", "t5", 120.0, policy=None, fallback=f"{NEW}: the engine answered HTTP 500"),
    ])  # fmt: skip
    found = serving.evidence.control_traffic(champion=OLD, now=900.0)
    evidence = evidence_of(found, challenger=OLD, champion=UPSTREAM_ARM, state="canary", now=900.0)
    # Nothing that only a session of the champion can meet leaves it out.
    assert [(one.challenger, one.value) for one in evidence.observations["failed"]] == [(True, 0.0)]


def test_the_champions_share_of_both_follows_the_control_group_and_a_canary(serving: Store):
    candidate = Policy(NEW, "base", SHA, "candidate", 1.0, parent=OLD)
    serving.ledger.add_candidate(candidate, trained_on=[], who="test")
    serving.ledger.set_control_group(20, who="test", now=110.0)
    serving.ledger.move(NEW, "canary", who="test", reason="try it", percent=50, now=120.0)
    serving.ledger.move(NEW, "rejected", who="test", reason="worse", now=130.0)
    serving.ledger.set_control_group(0, who="test", now=140.0)
    shares = serving.evidence.control_traffic(champion=OLD, now=200.0).shares
    # While the canary has half of the other 80 %, the champion has 40 of 60.
    assert [(at, round(share, 6)) for at, share in shares] == [
        (100.0, 95.0), (110.0, 80.0), (120.0, round(100 * 40 / 60, 6)), (130.0, 80.0), (140.0, 100.0)
    ]  # fmt: skip


def test_the_newest_calls_count_and_the_rest_of_the_test_is_not_known(serving: Store):
    serving.write([info(f"t{n}") for n in range(9)])
    serving.write([call(f"c{n}", f"t{n}", 110.0 + n, policy=OLD) for n in range(9)])
    found = serving.evidence.control_traffic(champion=OLD, now=200.0, limit=3)
    assert ([each.id for each in found.calls], found.shares, found.is_whole) == (
        ["c6", "c7", "c8"], ((116.0, 95.0),), False
    )  # fmt: skip
    late = serving.evidence.control_traffic(champion=OLD, now=115.0 + CONTROL_S)
    assert ([each.id for each in late.calls], late.is_whole) == (["c5", "c6", "c7", "c8"], False)


def test_what_was_pruned_since_is_not_taken_for_the_whole_test(serving: Store):
    serving.write([replace(info(f"t{n}"), started_at=110.0 + n) for n in range(9)])
    serving.write([call(f"c{n}", f"t{n}", 110.0 + n, policy=OLD) for n in range(9)])
    for how, kept, first in (({"older_than_s": 84.5}, 3, 115.5), ({"keep": 2}, 2, 117.0)):
        serving.rights.prune(**how, now=200.0)
        found = serving.evidence.control_traffic(champion=OLD, now=200.0)
        assert (len(found.calls), found.is_whole, found.shares[0][0]) == (kept, False, first)


def test_only_sessions_with_upstreams_present_model_are_compared(serving: Store):
    serving.write([info(f"t{n}") for n in range(9)])
    theirs = {"policy": None, "in_control_group": True}
    serving.write([
        call("theirs then", "t0", 110.0, answered_by="m-1", **theirs),
        call("ours then", "t1", 111.0, policy=OLD), call("began then", "t2", 112.0, policy=OLD),
        call("theirs now", "t3", 120.0, answered_by="m-2", **theirs),
        call("goes on", "t2", 121.0, policy=OLD), call("goes on too", "t0", 122.0, answered_by="m-2", **theirs),
        call("ours now", "t4", 123.0, policy=OLD), call("the old one again", "t5", 124.0, answered_by="m-1", **theirs),
    ])  # fmt: skip
    found = serving.evidence.control_traffic(champion=OLD, now=200.0)
    assert [each.id for each in found.calls] == ["theirs now", "ours now", "the old one again"]
    assert (found.shares, found.is_whole) == (((120.0, 95.0),), False)
    # Before the change nothing was known of it.
    then = serving.evidence.control_traffic(champion=OLD, now=119.0)
    assert ([each.id for each in then.calls][:3], then.is_whole) == (["theirs then", "ours then", "began then"], True)


def test_a_share_is_noted_once_and_only_what_is_possible_is_taken(serving: Store):
    before = len(serving.ledger.history())
    for percent in (-1, 51, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 50 percent"):
            serving.ledger.set_control_group(percent, who="test")
    serving.ledger.set_control_group(5, who="test")
    assert serving.ledger.route().control_percent == 5
    assert len(serving.ledger.history()) == before


def test_a_champion_that_is_retired_by_itself_leaves_the_calls_to_upstream(serving: Store):
    candidate = Policy(NEW, "base", SHA, "candidate", 1.0, parent=OLD)
    serving.ledger.add_candidate(candidate, trained_on=[], who="test")
    serving.ledger.move(NEW, "canary", who="test", reason="try it", percent=50)
    serving.ledger.move(OLD, "retired", who="test", reason="worse than upstream")
    route = serving.ledger.route()
    assert (route.champion, route.challenger, serving.ledger.champion()) == (None, None, None)
    assert {each.name: each.state for each in serving.ledger.policies()} == {OLD: "retired", NEW: "rejected"}
    # A server that starts again does not bring it back; a person may.
    assert serving.ledger.add_base(OLD, "base", SHA, who="test").state == "retired"
    serving.ledger.move(OLD, "champion", who="test", reason="a person knows better")
    assert serving.ledger.route().champion == OLD
