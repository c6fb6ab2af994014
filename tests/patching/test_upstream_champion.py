"""Upstream as the champion: it answers, the learner gets copies, and a canary has its share of the sessions."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest

import art_patch as art
from art_patch.context import Identity
from art_patch.patching import status
from art_patch.patching.routing.target import CallKeys
from art_patch.types import REPLAY_OF, Route
from tests.support.patched_sdk import CHAMPION, asked, shadowed
from tests.support.sdk_samples import ASK, GOES_ON
from tests.support.servers import error

LEARNER, CANARY = "shop@0", "shop@4"


def turn(bench: Any, runtime: Any, percent: float | None = None, **changes: Any) -> None:
    """The store says that the learner learns; with a share, that a canary is tested."""
    route: dict[str, Any] = {"base_url": bench.local.url, "learner": LEARNER}
    if percent is not None:
        tested = {"challenger_state": "canary", "challenger_percent": percent, "challenger_since": 1.0}
        route |= {"learner": None, "challenger": CANARY} | tested
    bench.route = Route(**(route | changes))
    runtime.poll()


def canarys(bench: Any, client: Any, sessions: int) -> set[str]:
    """The sessions that the canary answered, of so many with two runs each."""
    found = set[str]()
    for session in range(sessions):
        before = len(bench.local.seen)
        for _ in range(2):
            with art.trajectory(session_id=f"s{session}"):
                client.chat.completions.create(**ASK)
        assert len(bench.local.seen) - before in (0, 2)
        found |= {f"s{session}"} if len(bench.local.seen) > before else set()
    return found


@pytest.mark.parametrize("mode", ["route", "canary", "shadow"])
def test_upstream_answers_and_the_learner_gets_copies(bench, client, mode):
    runtime = bench.patch()
    turn(bench, runtime, mode=mode, canary_percent=100.0)
    client.chat.completions.create(**ASK)
    assert len(bench.upstream.seen) == 1
    shadowed(bench, 1)
    own, copy = bench.sink.calls
    assert (own.policy, own.fallback, own.in_control_group, own.shadow_of) == (None, None, False, None)
    assert (copy.policy, copy.shadow_of) == (LEARNER, own.id)
    assert (status().champion, asked(bench)) == (None, [LEARNER])


def test_where_a_policy_learns_no_call_pays_for_a_large_prompt(bench, client, monkeypatch):
    """Every session is copied, so none is hashed; and an image of megabytes is not copied to tell runs apart."""
    runtime = bench.patch()
    turn(bench, runtime)

    def hashed(*_: Any) -> str:
        raise AssertionError("the prompt was copied")

    monkeypatch.setattr(CallKeys, "session", property(hashed))
    client.chat.completions.create(**ASK)
    shadowed(bench, 1)

    class Content(str):
        def __repr__(self) -> str:
            raise AssertionError("the prompt was copied")

    def opening(data: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": Content(data)}}]}]}

    def run(data: str) -> tuple[str | int, bool]:
        return CallKeys(Identity(), opening(data)).run

    assert run("a") == run("a") != run("b")


@pytest.mark.parametrize("mode", ["off", "record"])
def test_a_mode_that_asks_no_policy_asks_no_learner(bench, client, mode):
    runtime = bench.patch()
    turn(bench, runtime, mode=mode)
    client.chat.completions.create(**ASK)
    assert bench.local.seen == []


def test_a_canary_has_its_share_of_the_sessions_and_upstream_the_others(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 30)
    found = canarys(bench, client, 60)
    assert 6 <= len(found) <= 30
    told = Counter((call.policy, call.in_control_group, call.fallback) for call in bench.sink.calls)
    assert told == {(CANARY, False, None): 2 * len(found), (None, True, None): 2 * (60 - len(found))}


def test_a_larger_share_keeps_its_sessions(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 20)
    few = canarys(bench, client, 40)
    turn(bench, runtime, 60)
    assert few < canarys(bench, client, 40)


def test_a_run_that_upstream_has_begun_stays_with_upstream_until_a_champion_serves(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 1e-6)
    with art.trajectory("t1"):
        client.chat.completions.create(**ASK)
        turn(bench, runtime, 100)
        client.chat.completions.create(**GOES_ON)
        turn(bench, runtime, champion=CHAMPION, learner=None)
        client.chat.completions.create(**GOES_ON)
    assert [call.policy for call in bench.sink.calls] == [None, None, CHAMPION]


@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_began_before_the_test_stays_with_upstream(bench, client, named):
    runtime = bench.patch()
    turn(bench, runtime)
    with art.trajectory("t1") if named else nullcontext():
        client.chat.completions.create(**ASK)
        turn(bench, runtime, 100)
        client.chat.completions.create(**GOES_ON)
    assert [call.policy for call in bench.sink.calls if call.shadow_of is None] == [None, None]


def test_a_session_that_the_canary_fails_twice_goes_on_with_upstream(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 100)
    bench.local.always = error(400)
    with art.trajectory("t1", session_id="s1"):
        for _ in range(3):
            client.chat.completions.create(**ASK)
    calls = bench.sink.calls
    assert [(call.policy, call.in_control_group) for call in calls] == [(None, False), (None, False), (None, True)]
    assert [(call.fallback or "").startswith(f"{CANARY}: ") for call in calls] == [True, True, False]
    bench.local.always = None
    with art.trajectory("t2", session_id="s2"):
        client.chat.completions.create(**ASK)
    assert bench.sink.calls[-1].policy == CANARY


def test_a_run_that_the_job_repeats_is_no_session_of_a_user(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 1e-6)
    with art.trajectory(metadata={REPLAY_OF: "t1"}):
        client.chat.completions.create(**ASK)
    assert [(call.policy, call.in_control_group) for call in bench.sink.calls] == [(None, False)]


def test_a_call_that_no_policy_can_answer_is_on_no_side(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 50)
    for session in range(10):
        with art.trajectory(session_id=f"s{session}"):
            client.chat.completions.create(**ASK, store=True)
    assert {(call.policy, call.in_control_group) for call in bench.sink.calls} == {(None, False)}


def test_an_unnamed_session_is_known_by_the_length_and_the_end_of_what_opens_it():
    def key(*messages: Any, **body: Any) -> str:
        said = [{"role": "user", "content": content} for content in messages]
        return CallKeys(Identity(), {"messages": said} | body).session

    long = "You are a helpful assistant. " * 400
    picture = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5_000_000}},
    ]
    keys = [key(said) for said in (long, long + "?", picture, [picture[0]], "", None, ["?"], {"text": "?"})]
    keys += [key(long, "hi"), key("hi", instructions="be kind"), key("hi")]
    assert len(set(keys)) == len(keys)
    assert max(map(len, keys)) < 2_000
    # What follows the first answer is not the opening.
    said = (("user", "hi"), ("assistant", "yes?"), ("user", "x"))
    goes_on = [{"role": role, "content": content} for role, content in said]
    assert CallKeys(Identity(), {"messages": goes_on}).session == key("hi")
