"""The control group: a share of the sessions stays with upstream, whoever else serves or is tested."""

from __future__ import annotations

from collections import Counter
from typing import Any

import openai

import art_patch as art
from art_patch.types import REPLAY_OF, Route
from tests.support.patched_sdk import CHAMPION, asked
from tests.support.sdk_samples import ASK

CANARY = "shop@4"


def turn(bench: Any, runtime: Any, control: float, **changes: Any) -> None:
    """The store says how large the control group is; every process sees it at its next look."""
    route: dict[str, Any] = {"champion": CHAMPION, "base_url": bench.local.url, "control_percent": control} | changes
    bench.route = Route(**route)
    runtime.poll()


def kept(bench: Any, client: Any, sessions: int) -> set[str]:
    """The sessions that upstream answered, of so many with two runs each."""
    found = set[str]()
    for session in range(sessions):
        before = len(bench.upstream.seen)
        for _ in range(2):
            with art.trajectory(session_id=f"s{session}"):
                client.chat.completions.create(**ASK)
        assert len(bench.upstream.seen) - before in (0, 2)
        found |= {f"s{session}"} if len(bench.upstream.seen) > before else set()
    return found


def test_its_sessions_stay_with_upstream_and_are_recorded_as_its(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 30)
    found = kept(bench, client, 60)
    assert 6 <= len(found) <= 30
    told = {(call.policy, call.in_control_group, call.fallback) for call in bench.sink.calls}
    assert told == {(CHAMPION, False, None), (None, True, None)}
    assert sum(call.in_control_group for call in bench.sink.calls) == 2 * len(found)


def test_a_larger_one_keeps_its_sessions_and_an_empty_one_has_none(bench, client):
    runtime = bench.patch()
    samples: dict[float, set[str]] = {}
    for percent in (20.0, 50.0, 0.0):
        turn(bench, runtime, percent)
        samples[percent] = kept(bench, client, 40)
    assert samples[20.0] < samples[50.0]
    assert samples[0.0] == set()


def test_a_canary_gets_none_of_its_sessions(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 30)
    before = kept(bench, client, 40)
    tested = {"challenger": CANARY, "challenger_state": "canary", "challenger_percent": 100.0, "challenger_since": 1.0}
    turn(bench, runtime, 30, **tested)
    assert kept(bench, client, 40) == before
    assert set(asked(bench)[-2 * (40 - len(before)) :]) == {CANARY}


def test_a_call_that_no_policy_can_answer_is_in_no_group(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 50)
    for session in range(20):
        with art.trajectory(session_id=f"s{session}"):
            client.chat.completions.create(**ASK, store=True)
    assert not any(call.in_control_group for call in bench.sink.calls)


def test_a_run_that_the_job_repeats_is_no_session_of_a_user(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 50)
    for session in range(20):
        with art.trajectory(session_id=f"s{session}", metadata={REPLAY_OF: "t1"}):
            client.chat.completions.create(**ASK)
    assert {(call.policy, call.in_control_group) for call in bench.sink.calls} == {(CHAMPION, False)}


def test_a_process_without_an_engine_to_ask_has_none(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 50, champion=None)
    assert len(kept(bench, client, 20)) == 20
    assert not any(call.in_control_group for call in bench.sink.calls)


def test_in_mode_canary_it_has_its_share_of_the_sessions_that_policies_may_answer(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 50, mode="canary", canary_percent=50.0)
    kept(bench, client, 60)
    # Two runs of one call each in a session.
    sides = Counter((call.policy, call.in_control_group) for call in bench.sink.calls)
    assert set(sides) == {(CHAMPION, False), (None, True), (None, False)}
    assert 10 <= sides[None, True] <= 50
    assert sides[None, False] >= 30


def test_calls_to_the_engine_itself_are_in_no_group(bench):
    runtime = bench.patch()
    turn(bench, runtime, 50)
    with openai.OpenAI(api_key="k", base_url=bench.local.url, max_retries=0) as client:
        for session in range(10):
            with art.trajectory(session_id=f"s{session}"):
                client.chat.completions.create(**ASK)
    assert [call.in_control_group for call in bench.sink.calls] == [False] * 10
