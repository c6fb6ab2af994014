"""A challenger beside the champion: a canary answers its share of the sessions, a shadow is asked in the background."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import art_patch as art
from art_patch.patching import status
from art_patch.types import Route, TrajectoryInfo
from tests.support.patched_sdk import CHAMPION, asked, shadowed
from tests.support.sdk_samples import ASK, GOES_ON, LOCAL, UPSTREAM, settled
from tests.support.servers import error

CANARY = "shop@4"


def turn(bench: Any, runtime: Any, percent: float | None, challenger: str = CANARY, **changes: Any) -> None:
    """The store says that this policy is tested; every process sees it at its next look."""
    state = "canary" if percent is not None else "shadow"
    bench.route = Route(
        champion=changes.pop("champion", CHAMPION),
        base_url=bench.local.url,
        challenger=challenger,
        challenger_state=state,
        challenger_percent=percent,
        challenger_since=1.0,
        **changes,
    )
    runtime.poll()


def give_up(bench: Any, runtime: Any, champion: str = CHAMPION) -> None:
    bench.route = Route(champion=champion, base_url=bench.local.url)
    runtime.poll()


def by_session(bench: Any, client: Any, sessions: int, each: int = 2) -> dict[str, set[str]]:
    """Whom each session's trajectories were answered by."""
    found: dict[str, set[str]] = {}
    for session in range(sessions):
        for _ in range(each):
            with art.trajectory(session_id=f"s{session}"):
                client.chat.completions.create(**ASK)
            found.setdefault(f"s{session}", set()).add(asked(bench)[-1])
    return found


def chosen(found: dict[str, set[str]], policy: str) -> set[str]:
    return {session for session, policies in found.items() if policies == {policy}}


def test_a_share_of_the_sessions_is_the_canarys(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 30)
    found = by_session(bench, client, 60)
    assert all(len(policies) == 1 for policies in found.values())
    assert 6 <= len(chosen(found, CANARY)) <= 30
    assert [call.policy for call in bench.sink.calls] == asked(bench)
    assert {(call.shadow_of, call.fallback) for call in bench.sink.calls} == {(None, None)}
    assert (status().champion, status().challenger, status().challenger_state) == (CHAMPION, CANARY, "canary")


def test_a_larger_share_keeps_who_was_in_it_and_another_canary_gets_others(bench, client):
    runtime = bench.patch()
    samples: dict[tuple[str, float], set[str]] = {}
    for challenger, percent in ((CANARY, 30.0), (CANARY, 60.0), ("shop@5", 30.0)):
        turn(bench, runtime, percent, challenger)
        samples[challenger, percent] = chosen(by_session(bench, client, 60, each=1), challenger)
    assert samples[CANARY, 30.0] < samples[CANARY, 60.0]
    assert samples[CANARY, 30.0] != samples["shop@5", 30.0]


CHOICES = """
from art_patch.context import Identity
from art_patch.patching.routing.target import CallKeys, Pins, Target
from art_patch.types import TrajectoryInfo

pins = Pins()
target = Target("route", "shop@3", "http://e/v1", challenger="shop@4", challenger_state="canary", challenger_percent=50)
for number in range(64):
    run = TrajectoryInfo(f"t{number}", 0.0, session_id=f"s{number}")
    bodies = {"messages": [{"role": "user", "content": f"q{number}"}]}
    print(*(pins.policy(CallKeys(who, bodies), target)[0] for who in (Identity(run), Identity())))
"""


def test_every_process_chooses_alike():
    said = [
        subprocess.run([sys.executable, "-c", CHOICES], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    ]
    assert said[0] == said[1]
    assert len(set(said[0].splitlines())) == 4


def test_runs_that_began_before_the_canary_stay_with_the_champion(bench, client):
    runtime = bench.patch()
    with art.trajectory("before"):
        client.chat.completions.create(**ASK)
        turn(bench, runtime, 100)
        client.chat.completions.create(**GOES_ON)
    with art.trajectory("after"):
        client.chat.completions.create(**ASK)
    assert asked(bench) == [CHAMPION, CHAMPION, CANARY]


def test_a_conversation_without_context_stays_on_its_side(bench, client):
    runtime = bench.patch()
    client.chat.completions.create(**ASK)
    turn(bench, runtime, 100)
    client.chat.completions.create(**GOES_ON)
    client.chat.completions.create(**ASK)
    client.chat.completions.create(**GOES_ON)
    assert asked(bench) == [CHAMPION, CHAMPION, CANARY, CANARY]


def test_a_run_stays_with_a_canary_that_is_promoted(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 100)
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        give_up(bench, runtime, champion=CANARY)
        client.chat.completions.create(**ASK)
        give_up(bench, runtime, champion="shop@5")
        client.chat.completions.create(**ASK)
    assert asked(bench) == [CANARY] * 3


@pytest.mark.parametrize("after", [CHAMPION, "shop@5"], ids=["given up", "another champion"])
def test_nobody_stays_with_a_canary_that_was_given_up(bench, client, after):
    """Also where the champion has a higher step than it, as one that was surpassed would have."""
    runtime = bench.patch()
    turn(bench, runtime, 100)
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        give_up(bench, runtime, champion=after)
        client.chat.completions.create(**ASK)
    client.chat.completions.create(**GOES_ON)
    assert asked(bench) == [CANARY, after, after]


def test_nobody_goes_on_with_a_champion_that_was_gone_back_from_when_a_later_one_comes(bench, client):
    runtime = bench.patch()
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        give_up(bench, runtime, champion="shop@2")
        give_up(bench, runtime, champion="shop@4")
        client.chat.completions.create(**ASK)
    assert asked(bench) == [CHAMPION, "shop@4"]


@pytest.mark.parametrize("mode", ["off", "record", "shadow"])
def test_other_modes_show_nobody_a_canary(bench, client, mode):
    runtime = bench.patch()
    turn(bench, runtime, 100, mode=mode)
    client.chat.completions.create(**ASK)
    assert len(bench.upstream.seen) == 1
    if mode == "shadow":
        shadowed(bench, 1)
    assert asked(bench) == ([CHAMPION] if mode == "shadow" else [])


@pytest.mark.parametrize("mode", ["off", "record"])
def test_modes_that_ask_nobody_ask_no_shadow(bench, client, mode):
    runtime = bench.patch()
    turn(bench, runtime, None, mode=mode)
    client.chat.completions.create(**ASK)
    assert len(bench.sink.calls) == (mode == "record")
    assert bench.local.seen == []
    assert (status().shadowed, status().shadow_skipped) == (0, 0)


def test_in_mode_canary_it_has_a_share_of_our_share(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 50, mode="canary", canary_percent=50.0)
    for session in range(80):
        with art.trajectory(session_id=f"s{session}"):
            client.chat.completions.create(**ASK)
    sides = Counter(call.policy for call in bench.sink.calls)
    assert set(sides) == {None, CHAMPION, CANARY}
    assert all(count >= 8 for count in sides.values())


@pytest.mark.parametrize("stream", [False, True])
def test_a_canary_that_fails_falls_back_and_says_who_failed(bench, client, stream):
    runtime = bench.patch()
    turn(bench, runtime, 100)
    bench.local.will(error(500))
    result = client.chat.completions.create(**ASK, stream=stream)
    if stream:
        list(result)
    call = bench.sink.call
    assert (call.policy, call.fallback) == (None, "shop@4: the engine answered HTTP 500: no")
    assert (status().fallbacks, len(bench.upstream.seen)) == (1, 1)


def test_a_session_leaves_the_canary_at_its_second_failure(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 100)

    def ask(session: str) -> str:
        with art.trajectory(session_id=session):
            client.chat.completions.create(**ASK)
        return asked(bench)[-1]

    assert ask("one") == CANARY
    for _ in range(2):
        bench.local.will(error(500))
        assert ask("one") == CANARY
    assert [ask("one"), ask("one"), ask("other")] == [CHAMPION, CHAMPION, CANARY]
    assert bench.sink.calls[-2].fallback is None
    turn(bench, runtime, 100, challenger="shop@5")
    assert ask("one") == "shop@5"


def test_a_run_leaves_the_canary_at_its_second_failure(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 100)
    with art.trajectory("run"):
        for _ in range(2):
            bench.local.will(error(500))
            client.chat.completions.create(**ASK)
        client.chat.completions.create(**ASK)
    assert asked(bench) == [CANARY, CANARY, CHAMPION]


def test_a_canary_that_keeps_failing_does_not_cost_the_champion_its_calls(bench, client):
    runtime = bench.patch()
    with art.trajectory("champion's") as run:
        client.chat.completions.create(**ASK)
    turn(bench, runtime, 100)
    bench.local.always = error(500)
    for _ in range(7):
        with art.trajectory():
            client.chat.completions.create(**ASK)
    bench.local.always = None
    assert asked(bench) == [CHAMPION] + [CANARY] * 5
    assert bench.sink.calls[-1].fallback == "shop@4: the engine failed repeatedly and is left alone for a moment"
    assert "shop@4 failed repeatedly; calls meant for it go upstream for now." in runtime.sentences()
    with art.trajectory(id=run.id):
        client.chat.completions.create(**ASK)
    give_up(bench, runtime)
    client.chat.completions.create(**ASK)
    assert asked(bench)[6:] == [CHAMPION, CHAMPION]
    assert runtime.sentences() == ()


def test_a_canary_that_is_not_served_falls_back_once_and_opens_its_own_breaker(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, 100)
    bench.local.always = error(404)
    for _ in range(7):
        with art.trajectory():
            client.chat.completions.create(**ASK)
    assert asked(bench) == [CANARY] * 5
    assert runtime.breaker.closed
    assert len(bench.upstream.seen) == 7


def test_an_app_that_called_nobody_for_long_begins_with_what_the_store_says_now(bench, client):
    """Its thread, which looks at the store, starts with its first call."""
    bench.route = Route(champion=CHAMPION, base_url=bench.local.url, challenger=CANARY, challenger_state="canary",
                        challenger_percent=100.0)  # fmt: skip
    bench.patch(poll_interval_s=0.2)
    bench.route = Route(champion="shop@2", base_url=bench.local.url)
    time.sleep(0.25)
    client.chat.completions.create(**ASK)
    assert asked(bench) == ["shop@2"]


def test_a_canary_just_given_up_is_looked_up(bench, client):
    runtime = bench.patch(poll_interval_s=2.0)
    turn(bench, runtime, 100)
    with art.trajectory("one"):
        client.chat.completions.create(**ASK)
        bench.route = Route(champion=CHAMPION, base_url=bench.local.url)
        bench.local.will(error(404))
        client.chat.completions.create(**ASK)
    assert asked(bench) == [CANARY, CANARY, CHAMPION]
    assert [call.fallback for call in bench.sink.calls] == [None, None]
    assert bench.upstream.seen == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_shadow_is_asked_what_the_champion_answered(bench, client, stream):
    runtime = bench.patch()
    turn(bench, runtime, None)
    with art.trajectory("refund", scenario="r1", session_id="s") as mine:
        result = client.chat.completions.create(**ASK, temperature=0.5, stream=stream)
        if stream:
            list(result)
    assert bench.sink.calls
    shadowed(bench, 1)
    seen, shadow = bench.sink.calls
    assert (seen.policy, seen.shadow_of, seen.trajectory_id) == (CHAMPION, None, mine.id)
    assert settled(shadow) == replace(LOCAL, policy=CANARY, params={"temperature": 0.5}, shadow_of=seen.id)
    (info,) = [r for r in bench.sink.records if isinstance(r, TrajectoryInfo) and r.origin == "shadow"]
    assert (info.id, info.scenario_key, info.session_id) == (shadow.trajectory_id, "r1", "s")
    assert [one.body.get("priority") for one in bench.local.seen] == [None, 1]
    assert bench.upstream.seen == []


def test_in_mode_shadow_both_are_asked(bench, client):
    runtime = bench.patch()
    turn(bench, runtime, None, mode="shadow")
    client.chat.completions.create(**ASK)
    assert bench.sink.calls
    shadowed(bench, 2)
    seen, *copies = bench.sink.calls
    assert settled(seen) == UPSTREAM
    assert [copy.policy for copy in copies] == [CHAMPION, CANARY]
    assert {copy.shadow_of for copy in copies} == {seen.id}


def test_shadows_share_one_budget(bench, client):
    runtime = bench.patch(shadow_per_minute=2)
    turn(bench, runtime, None)
    for _ in range(5):
        client.chat.completions.create(**ASK)
    assert len([call for call in bench.sink.calls if call.shadow_of is None]) == 5
    shadowed(bench, 2)
    assert status().shadow_skipped == 3


def test_a_shadow_that_fails_does_not_cost_the_champion_its_calls(bench, client):
    runtime = bench.patch(mode="record")
    turn(bench, runtime, None, mode="shadow")
    bench.local.always = error(500)
    for _ in range(4):
        client.chat.completions.create(**ASK)
        assert bench.sink.calls
    shadowed(bench, 8)
    bench.local.always = None
    assert runtime.breaker.closed
    turn(bench, runtime, None, mode="route")
    client.chat.completions.create(**ASK)
    assert [call.policy for call in bench.sink.calls if call.shadow_of is None][-1] == CHAMPION
