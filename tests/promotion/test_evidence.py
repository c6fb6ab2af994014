"""Which session counts for whom, when, and with which value."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_patch.promotion import evidence_of
from art_patch.promotion.evidence import LATE_S, LONGEST_S, SILENCE_S, Arm, Evidence, Observation
from art_patch.types import UPSTREAM_ARM, ArmCall, ArmTraffic, Score

NEW, OLD = "agent@1", "agent@0"
REST_S = 60.0
LATER = 10.0 * LATE_S


def call(key: str, policy: str, at: float = 100.0, **changes) -> ArmCall:
    """A call that ends then, after ten milliseconds."""
    values = {
        "id": key, "trajectory_id": f"t-{key}", "session": f"s-{key}", "group_id": None, "at": at, "policy": policy,
        "status": "ok", "fell_back": False, "duration_ms": 10.0, "ttft_ms": None, "empty": False,
    }  # fmt: skip
    return ArmCall(**(values | changes))


def score(run: str, value: float, name: str = "reward", source: str = "user", at: float = 101.0, **more) -> Score:
    return Score(f"{run}-{name}-{at}", f"t-{run}", name, value, source, at, **more)


def evidence(
    calls: list[ArmCall], scores: tuple[Score, ...] = (), state="canary", now: float = LATER, shares=((0.0, 20.0),)
) -> Evidence:
    traffic = ArmTraffic(tuple(calls), tuple(scores), shares)
    return evidence_of(traffic, challenger=NEW, champion=OLD, state=state, now=now, rest_s=REST_S)


def values(found: Evidence, signal: str) -> list[tuple[float, bool, float]]:
    return [(one.at, one.challenger, one.value) for one in found.observations[signal]]


def test_a_session_has_one_value_for_each_signal_and_belongs_to_the_policy_of_its_first_call():
    found = evidence([
        call("a", OLD, 100, session="one", duration_ms=100.0),
        call("b", OLD, 110, session="one", duration_ms=400.0, empty=True),
        call("c", NEW, 120, session="two", ttft_ms=5.0),
        call("d", OLD, 130, session="two", status="error"),  # it has left the canary, and stays in its arm
        call("e", "agent@7", 140),
        call("f", NEW, 150, session="three", fell_back=True),
        call("g", OLD, 160, session="four", status="abandoned"),
    ])  # fmt: skip
    assert (found.challenger, found.champion) == (Arm(2, 2, 1), Arm(4, 2, 1))
    assert values(found, "failed") == [
        (130, True, 1.0), (150, True, 1.0), (110 + REST_S, False, 0.0), (160 + REST_S, False, 0.0),
    ]  # fmt: skip
    assert values(found, "empty") == [(110 + REST_S, False, 0.5), (130 + REST_S, True, 0.0)]
    assert values(found, "latency_ms") == [(170.0, False, pytest.approx(200.0)), (190.0, True, pytest.approx(10.0))]
    assert values(found, "ttft_ms") == [(190.0, True, pytest.approx(5.0))]
    assert {one.share for its in found.observations.values() for one in its} == {0.2}


def test_what_comes_after_a_rest_or_after_the_longest_time_is_no_part_of_the_session():
    calls = [call("a", OLD, 100), call("b", OLD, 100 + REST_S + 0.02, session="s-a", status="error")]
    assert values(evidence(calls), "failed") == [(160.0, False, 0.0)]
    steady = [call(f"{n}", OLD, 100.0 + 50 * n, session="s", status="error" if n > 72 else "ok") for n in range(90)]
    assert values(evidence(steady), "failed") == [(99.99 + LONGEST_S + REST_S, False, 0.0)]


def test_nothing_is_known_before_a_session_has_ended_but_its_failure():
    calls = [call("a", OLD, 100), call("b", NEW, 110), call("c", NEW, 120, session="s-b", status="error")]
    assert evidence(calls, now=119.0).observations["failed"] == []
    assert values(evidence(calls, now=121.0), "failed") == [(120, True, 1.0)]
    assert values(evidence(calls, now=160.0), "failed") == [(120, True, 1.0), (160.0, False, 0.0)]
    assert values(evidence(calls, now=179.0), "latency_ms") == [(160.0, False, pytest.approx(10.0))]


def test_the_first_reward_of_a_session_counts_and_none_after_it():
    calls = [call("a", OLD, trajectory_id="t-a"), call("b", OLD, trajectory_id="t-b", session="s-a"), call("c", NEW)]
    scores = [score("a", 1.0), score("b", 0.0, at=102.0), score("c", 0.25, at=500.0, source="code")]
    wanted = [(160.0, False, 0.5), (500.0, True, 0.25)]
    assert values(evidence(calls, tuple(scores)), "reward") == wanted
    later = (*scores, score("c", 1.0, at=600.0), score("a", 0.0, at=700.0), score("c", 1.0, at=400.0, source="someone"))
    assert values(evidence(calls, later), "reward") == wanted
    assert values(evidence(calls, tuple(scores), now=499.0), "reward") == wanted[:1]
    assert values(evidence(calls, (score("c", 1.0, at=100.0 + LATE_S),)), "reward") == []


def test_whether_a_session_was_rewarded_is_a_signal_of_its_own():
    calls = [call("a", OLD), call("b", NEW), call("c", NEW)]
    scores = (score("a", 1.0), score("b", 1.0, "thumbs"), score("c", 1.0, at=200.0 + SILENCE_S))
    found = evidence(calls, scores)
    at = 160.0 + SILENCE_S
    assert [(one.at, one.challenger, one.value) for one in found.heard["reward"]] == [
        (at, False, 1.0), (at, True, 0.0), (at, True, 0.0),
    ]  # fmt: skip
    assert [one.value for one in found.heard["feedback"]] == [0.0, 1.0, 0.0]
    assert [one.value for one in found.with_silence["reward"]] == [1.0, 0.0, 0.0]
    assert [one.value for one in found.with_silence["feedback"]] == [0.0, 1.0, 0.0]
    assert evidence(calls, scores, now=at - 1).heard == {"reward": [], "feedback": []}


def test_what_upstream_helped_out_with_has_earned_nothing():
    calls = [call("a", OLD), call("b", NEW, fell_back=True), call("c", NEW)]
    calls.append(call("d", NEW, trajectory_id="t-d", session="s-c", fell_back=True))
    scores = (score("a", 0.5), score("b", 1.0), score("c", 1.0), score("d", 1.0), score("b", 1.0, "thumbs"))
    found = evidence(calls, scores)
    assert values(found, "reward") == [(160.0, False, 0.5), (160.0, True, 0.0), (160.0, True, 0.5)]
    assert values(found, "feedback") == [(160.0, True, 0.0)]


def test_feedback_is_what_people_said_on_a_scale_from_0_to_1():
    calls = [call("a", OLD), call("b", NEW), call("c", NEW)]
    scores = (score("a", -1.0, "thumbs"), score("b", 1.0, "thumbs", at=102.0), score("b", 0.5, "rating", at=103.0))
    assert values(evidence(calls, scores), "feedback") == [(160.0, False, 0.0), (160.0, True, 0.75)]


def test_the_judge_compares_within_groups_and_each_session_once():
    calls = [call("a", OLD, group_id="g"), call("b", NEW, group_id="g"), call("c", NEW, group_id="g")]
    calls += [call("d", NEW, group_id="h", session="s-b"), call("e", OLD, group_id="h"), call("f", OLD, group_id="i")]
    ranks = [score(key, value, "ruler", "ruler", at=at, group_id=group) for key, value, at, group in (
        ("a", 0.5, 500.0, "g"), ("b", 0.9, 500.0, "g"), ("c", 0.7, 500.0, "g"),
        ("d", 1.0, 600.0, "h"), ("e", 0.0, 600.0, "h"), ("f", 0.5, 500.0, "other"),
    )]  # fmt: skip
    found = evidence(calls, tuple(ranks))
    assert found.observations["reward"] == [
        Observation(500.0, False, 0.5, 0.2, pytest.approx(0.8)),
        Observation(500.0, True, 0.9, 0.2, pytest.approx(0.6)),
        Observation(500.0, True, 0.7, 0.2, pytest.approx(0.7)),
    ]
    assert "reward" not in found.heard
    again = (*ranks, *(replace(each, id=each.id + "2", value=0.1, at=700.0) for each in ranks))
    assert evidence(calls, again).observations["reward"] == found.observations["reward"]
    own = (*ranks, score("b", 0.3), score("c", 0.4, source="combined", group_id="g", at=505.0))
    assert values(evidence(calls, own), "reward") == [(160.0, True, 0.3), (505.0, False, 0.5), (505.0, True, 0.4)]


def test_a_reward_that_comes_after_the_judges_score_changes_nothing_that_was_compared():
    calls = [call(key, NEW if key == "b" else OLD, group_id="g") for key in ("a", "b", "c", "d")]
    ranks = [
        score(key, value, "ruler", "ruler", at=500.0, group_id="g")
        for key, value in (("a", 0.5), ("b", 0.9), ("c", 0.7))
    ]
    first = evidence(calls, tuple(ranks), now=550.0).observations["reward"]
    assert [(one.at, one.value) for one in first] == [(500.0, 0.5), (500.0, 0.9), (500.0, 0.7)]
    later = (*ranks, score("a", 0.0, at=600.0), score("d", 0.25, at=610.0))
    found = evidence(calls, later).observations["reward"]
    assert found[:-1] == first
    assert (found[-1].at, found[-1].value) == (610.0, 0.25)


def test_sessions_that_found_no_engine_or_no_room_leave_both_arms():
    calls = [
        call("a", OLD, 100), call("b", NEW, 110), call("full", NEW, 120), call("", "", 121, session="s-full"),
        call("c", OLD, 1_000), call("d", NEW, 1_010, status="error"), call("x", "", 1_020, fell_back=True, down=True),
        call("e", OLD, 1_100), call("f", NEW, 1_110),
    ]  # fmt: skip
    found = evidence(calls)
    assert [at for at, _, _ in values(found, "failed")] == [160.0, 170.0, 1_160.0, 1_170.0]
    assert (found.challenger.sessions, found.champion.sessions) == (4, 3)


def test_an_outage_lasts_until_a_policy_answers_again():
    """Seldom calls: without this, only the arm that needs no engine would keep its sessions of that time."""
    calls = [
        call("a", OLD, 100), call("before", UPSTREAM_ARM, 200),
        call("x", "", 1_000, fell_back=True, down=True), call("during", UPSTREAM_ARM, 3_000),
        call("y", "", 5_000, fell_back=True, down=True), call("again", UPSTREAM_ARM, 6_000),
        call("b", OLD, 7_000), call("after", UPSTREAM_ARM, 7_100),
    ]  # fmt: skip
    traffic = ArmTraffic(tuple(calls), (), ((0.0, 90.0),))
    found = evidence_of(traffic, challenger=OLD, champion=UPSTREAM_ARM, state="canary", now=9_000.0, rest_s=REST_S)
    assert [at - REST_S for at, _, _ in values(found, "failed")] == [100, 200, 7_000, 7_100]


def test_each_session_has_the_share_of_its_begin_and_the_first_moments_of_a_share_are_left_out():
    calls = [call(f"{at}", NEW if at % 20 else OLD, at) for at in range(100, 200, 10)]
    found = evidence(calls, shares=((98.0, 5.0), (142.0, 20.0), (180.0, 50.0)))
    assert [(one.at - REST_S, one.share) for one in found.observations["failed"]] == [
        (110, 0.05), (120, 0.05), (130, 0.05), (140, 0.05), (150, 0.2), (160, 0.2), (170, 0.2), (180, 0.2), (190, 0.5),
    ]  # fmt: skip
    assert found.percents == [5.0, 20.0, 50.0]


def test_a_shadows_copies_are_compared_with_the_very_calls_that_they_copy():
    calls = [
        call("a", OLD, 1, duration_ms=50.0), call("b", OLD, 2, session="s-a", duration_ms=50.0), call("c", OLD, 3),
        call("x", NEW, 4, shadow_of="b", duration_ms=90.0), call("y", NEW, 5, shadow_of="a", duration_ms=90.0),
        call("z", NEW, 6, shadow_of="c", status="error"), call("w", NEW, 7, shadow_of="of upstream"),
    ]  # fmt: skip
    found = evidence(calls, (score("a", 1.0), score("x", 0.0)), state="shadow")
    assert found.observations == {
        "failed": [Observation(5, True, 0.0, champions=0.0), Observation(6, True, 1.0, champions=0.0)],
        "empty": [Observation(5, True, 0.0, champions=0.0)],
        "latency_ms": [Observation(5, True, pytest.approx(90.0), champions=pytest.approx(50.0))],
    }
    assert (found.challenger, found.champion) == (Arm(4, 4, 1), Arm(3, 2, 0))


def test_a_shadows_session_that_goes_on_after_its_rest_keeps_the_value_that_it_had():
    calls = [call("a", OLD, 1), call("b", OLD, 500, session="s-a"), call("x", NEW, 2, shadow_of="a")]
    first = evidence(calls, state="shadow", now=100.0).observations
    assert first["failed"] == [Observation(2, True, 0.0, champions=0.0)]
    calls.append(call("y", NEW, 501, shadow_of="b", status="error"))
    assert evidence(calls, state="shadow").observations == first


SESSIONS = st.lists(
    st.tuples(st.integers(0, 5), st.floats(100, 5_000), st.booleans(), st.sampled_from(["ok", "error"]), st.booleans()),
    max_size=30,
)


@given(SESSIONS, st.lists(st.tuples(st.integers(0, 29), st.floats(100, 6_000), st.floats(0, 1)), max_size=20))
def test_what_was_known_at_one_look_is_the_same_at_every_later_one(sessions, scores):
    """Else looking again and again would not be one test."""
    calls = [
        call(f"{n}", NEW if key % 2 else OLD, at, session=f"s{key}", status=status, fell_back=left)
        for n, (key, at, _, status, left) in enumerate(sessions)
    ]
    calls.sort(key=lambda each: each.at)
    given = tuple(score(f"{n}", value, at=at) for n, at, value in sorted(scores, key=lambda one: one[1]))
    whole = evidence(calls, given)
    for now in (500.0, 2_000.0, 4_000.0):
        known = [each for each in calls if each.at <= now], tuple(each for each in given if each.at <= now)
        look = evidence(*known, now=now)
        for name, its in look.observations.items():
            assert its == [one for one in whole.observations[name] if one.at <= now], name
