"""A full engine says so, and the call goes upstream at once; that is no failure of the engine nor of a policy."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import openai
import pytest

from art_patch.patching import status
from art_patch.types import ENGINE_FULL, WAIT_HEADER, Route
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK
from tests.support.servers import Answer, error


def full(**headers: str) -> Answer:
    body = json.dumps({"error": {"message": "the engine is full", "type": "t", "code": "engine_full"}})
    return Answer(429, body.encode(), headers=headers)


def waits(bench: Any) -> list[float]:
    """How long each request that the engine got accepts to wait."""
    return [float({name.lower(): value for name, value in seen.headers.items()}[WAIT_HEADER])
            for seen in bench.local.seen]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_the_call_goes_upstream_and_the_engine_is_left_alone_for_a_moment(bench, client, stream):
    runtime = bench.patch(first_token_timeout_s=3.0)
    bench.local.will(full(**{"retry-after-ms": "4000", "retry-after": "1"}))
    for _ in range(7):
        result = client.chat.completions.create(**ASK, stream=stream)
        if stream:
            list(result)
    # The first call was refused; the others did not ask.
    assert len(bench.local.seen) == 1
    assert waits(bench) == [1.5]
    assert [(call.policy, call.status, call.fallback) for call in bench.sink.calls] == [(None, "ok", ENGINE_FULL)] * 7
    assert (status().fallbacks, status().engine_full, status().degraded) == (7, 7, ())
    assert runtime.breaker.closed
    runtime._full_until = time.monotonic()
    assert client.chat.completions.create(**ASK).system_fingerprint == CHAMPION


@pytest.mark.parametrize(
    "headers, at_most_s",
    [({}, 1.0), ({"retry-after": "2"}, 2.0), ({"retry-after": "3600"}, 5.0), ({"retry-after": "Fri, 31 Dec"}, 1.0)],
)
def test_every_engine_that_says_429_is_full(bench, client, headers, at_most_s):
    runtime = bench.patch()
    bench.local.will(full(**headers))
    client.chat.completions.create(**ASK)
    assert bench.sink.call.fallback == ENGINE_FULL
    assert runtime._full_until <= time.monotonic() + at_most_s


def test_a_full_engine_neither_opens_the_breaker_nor_closes_it(bench, client):
    runtime = bench.patch()
    bench.local.always = full(**{"retry-after-ms": "0"})
    for _ in range(7):
        client.chat.completions.create(**ASK)
    assert len(bench.local.seen) == 7
    assert runtime.breaker.closed
    runtime.breaker.trip(time.monotonic() - 60)  # the cool-down is over: the next call is the probe
    client.chat.completions.create(**ASK)
    assert len(bench.local.seen) == 8
    assert not runtime.breaker.closed
    bench.local.always = None
    assert client.chat.completions.create(**ASK).system_fingerprint == CHAMPION
    assert runtime.breaker.closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refused", [True, False])
def test_without_a_provider_the_call_waits_for_its_turn(bench, client, refused, stream):
    """Upstream fails, so the engine is asked once more, with all the patience that a whole answer may take."""
    runtime = bench.patch(timeout_s=6.0, first_token_timeout_s=4.0)
    if refused:
        bench.local.will(full(**{"retry-after-ms": "4000"}))
    else:
        runtime.engine_full(60)
    bench.upstream.will(error(401))
    result = client.chat.completions.create(**ASK, stream=stream)
    if stream:
        list(result)
    call = bench.sink.call
    assert (call.policy, call.status, call.fallback) == (CHAMPION, "ok", None)
    assert waits(bench) == [2.0, 3.0][not refused :]
    assert status().engine_full == 0


def test_a_full_engine_and_no_provider_is_the_providers_error(bench, client):
    runtime = bench.patch()
    bench.local.always = full()
    bench.upstream.will(error(401))
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(**ASK)
    assert len(bench.local.seen) == 2
    assert bench.sink.call.fallback == ENGINE_FULL
    assert runtime.breaker.closed


def test_a_crowd_asks_as_many_at_once_as_the_engine_has_shown_to_take(bench, client, make_async):
    """The fifth and later callers do not try; each answer lets one more through."""
    runtime = bench.patch()
    runtime._room = 4
    bench.local.always = Answer(hang=True)

    async def crowd() -> list[Any]:
        async with make_async() as client:
            return await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(9)))

    asking = threading.Thread(target=asyncio.run, args=(crowd(),))
    asking.start()
    deadline = time.monotonic() + 20
    while len(bench.upstream.seen) < 5 or len(bench.local.seen) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (len(bench.upstream.seen), len(bench.local.seen)) == (5, 4)
    assert runtime._room == 4
    bench.local.released.set()
    asking.join(30)
    assert not asking.is_alive()


def test_answers_make_room_and_a_refusal_takes_it(bench):
    runtime = bench.patch()
    runtime._room = 4
    calls = [object(), object(), object()]
    for call in calls:
        runtime.began(call)
    runtime.ended(calls[0])
    runtime.engine_answered()
    assert (runtime._room, runtime.has_room()) == (5, True)
    runtime.engine_answered()  # of five only two are used, so no more is needed
    assert runtime._room == 5
    runtime.engine_full(60)
    assert (runtime._room, runtime.has_room()) == (2, False)
    runtime.engine_answered()
    assert runtime._room == 2
    bench.route = Route(champion=CHAMPION, base_url="http://127.0.0.1:9/v1")
    runtime.poll()  # another engine has not said that it is full
    assert runtime.has_room()


def test_copies_in_the_background_are_left_out_first(bench, client):
    """They accept no wait, they do not ask while the engine is full, and a refusal is no failure of the policy."""
    runtime = bench.patch(mode="shadow")
    bench.local.will(full(**{"retry-after-ms": "1"}))
    client.chat.completions.create(**ASK)
    deadline = time.monotonic() + 20
    while status().shadow_skipped < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert waits(bench) == [0.0]
    runtime.engine_full(60)
    client.chat.completions.create(**ASK)
    while status().shadow_skipped < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(bench.local.seen) == 1
    assert (status().shadowed, status().shadow_failed) == (0, 0)
    assert [call.shadow_of for call in bench.sink.calls] == [None, None]
    assert runtime.breaker.closed


def test_the_canarys_calls_name_it(bench, client):
    runtime = bench.patch()
    bench.route = Route(
        champion=CHAMPION, base_url=bench.local.url, challenger="shop@4", challenger_state="canary",
        challenger_percent=100, challenger_since=1.0,
    )  # fmt: skip
    runtime.poll()
    bench.local.always = full(**{"retry-after-ms": "0"})
    for _ in range(7):
        client.chat.completions.create(**ASK)
    assert {call.fallback for call in bench.sink.calls} == {f"shop@4: {ENGINE_FULL}"}
    assert status().engine_full == 7
    assert runtime.challenger_breaker.closed
