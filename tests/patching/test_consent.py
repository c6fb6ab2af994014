"""Whose runs may be learned from: the app says so by an argument or a header, and no wrong word of it can hurt."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

import art_patch as art
from art_patch.patching import control
from art_patch.types import Route, TrajectoryInfo
from tests.support.patched_sdk import CHAMPION, Bench, shadowed
from tests.support.sdk_samples import ASK, GOES_ON
from tests.support.servers import Answer

NO = {"X-Art-Patch-Learn": "no"}


def runs(bench: Bench) -> dict[str, bool]:
    """Run -> whether the records so far let it be learned from."""
    assert bench.sink.calls
    found: dict[str, bool] = {}
    for record in bench.sink.records:
        if isinstance(record, TrajectoryInfo):
            found[record.id] = record.learn and found.get(record.id, True)
    return found


def learned(bench: Bench) -> list[bool]:
    return list(runs(bench).values())


def never_sent(bench: Bench) -> bool:
    seen = [*bench.upstream.seen, *bench.local.seen]
    return bool(seen) and not any("art-patch-learn" in name.lower() for each in seen for name in each.headers)


def test_an_argument_marks_the_run_and_the_outer_no_wins(bench: Bench, client: Any):
    bench.patch()
    with art.trajectory(id="no", learn=False):
        client.chat.completions.create(**ASK)
        with art.trajectory(id="inner", learn=True), art.span("step", learn=True):
            client.chat.completions.create(**ASK)
    with art.trajectory(id="yes"), art.span("step"):
        client.chat.completions.create(**ASK)
    assert runs(bench) == {"no": False, "inner": False, "yes": True}


def test_a_span_inside_keeps_its_whole_run_out_and_one_outside_is_the_run(bench: Bench, client: Any):
    bench.patch()
    with art.trajectory(id="whole"):
        client.chat.completions.create(**ASK)
        with art.span("private", learn=False):
            client.chat.completions.create(**ASK)
        client.chat.completions.create(**ASK)
    with art.span("alone", learn=False):
        client.chat.completions.create(**ASK)
    assert runs(bench)["whole"] is False
    assert learned(bench) == [False, False]


@pytest.mark.parametrize("wrong", ["no", None, 0, 1, object()])
def test_anything_but_true_forbids_and_raises_nothing(bench: Bench, client: Any, wrong: Any):
    bench.patch()
    with art.trajectory(learn=wrong):
        client.chat.completions.create(**ASK)
    assert learned(bench) == [False]


@pytest.mark.parametrize("goes", ["upstream", "engine"])
def test_a_header_of_the_call_marks_its_run_and_reaches_nobody(bench: Bench, client: Any, goes: str):
    bench.route = bench.route if goes == "engine" else Route()
    bench.patch()
    client.chat.completions.create(**ASK, extra_headers={**NO, "X-Mine": "1"})
    assert learned(bench) == [False]
    assert never_sent(bench)
    if goes == "upstream":
        assert bench.upstream.seen[0].headers["x-mine"] == "1"


@pytest.mark.parametrize("goes", ["upstream", "engine"])
def test_a_header_of_the_client_marks_all_its_runs_and_reaches_nobody(bench: Bench, goes: str):
    bench.route = bench.route if goes == "engine" else Route()
    bench.patch()
    url, key = bench.upstream.url, "k"
    with openai.OpenAI(api_key=key, base_url=url, default_headers={"x-art-patch-LEARN": "no"}) as client:
        client.chat.completions.create(**ASK)
        with client.chat.completions.create(**ASK, stream=True) as stream:
            list(stream)
        client.with_options(max_retries=0).chat.completions.create(**ASK, extra_headers={"X-Art-Patch-Learn": "yes"})
    assert learned(bench) == [False] * 3
    assert never_sent(bench)


def test_the_header_of_an_asynchronous_call_is_read_too(bench: Bench, make_async: Any):
    bench.patch()

    async def ask() -> None:
        async with make_async() as client:
            await client.chat.completions.create(**ASK, extra_headers=NO)
            await client.chat.completions.create(**ASK)

    asyncio.run(ask())
    assert learned(bench) == [False, True]
    assert never_sent(bench)


def test_a_call_that_falls_back_takes_no_header_along(bench: Bench, client: Any):
    bench.patch()
    bench.local.always = Answer(status=500)
    client.chat.completions.create(**ASK, extra_headers=NO)
    assert (bool(bench.local.seen), len(bench.upstream.seen)) == (True, 1)
    assert never_sent(bench)
    assert learned(bench) == [False]


@pytest.mark.parametrize(
    ("said", "learn"), [("yes", True), (" TRUE ", True), ("nein", False), ("", False), ("0", False)]
)
def test_only_a_clear_yes_is_one(bench: Bench, client: Any, said: str, learn: bool):
    bench.patch()
    client.chat.completions.create(**ASK, extra_headers={"X-Art-Patch-Learn": said})
    assert learned(bench) == [learn]
    assert never_sent(bench)


def test_options_that_the_app_sends_twice_say_it_twice(bench: Bench, client: Any):
    bench.patch()
    for _ in range(2):
        client.post("/chat/completions", body=dict(ASK), cast_to=object, options={"headers": NO})
    assert learned(bench) == [False, False]


@pytest.mark.parametrize("mode", ["off", "record"])
def test_no_mode_sends_the_header(bench: Bench, client: Any, mode: str):
    bench.patch(mode=mode)
    client.chat.completions.create(**ASK, extra_headers=NO)
    client.embeddings.create(model="e", input="hi", encoding_format="float", extra_headers=NO)
    assert len(bench.upstream.seen) == 2
    assert never_sent(bench)


def test_a_later_no_marks_a_run_that_was_announced_before(bench: Bench, client: Any):
    bench.patch()
    client.chat.completions.create(**ASK)
    assert learned(bench) == [True]
    client.chat.completions.create(**GOES_ON, extra_headers=NO)
    assert learned(bench) == [False]


def test_a_whole_process_may_say_no(bench: Bench, client: Any):
    bench.patch(learn=False)
    with art.trajectory(learn=True):
        client.chat.completions.create(**ASK)
    client.chat.completions.create(**ASK)
    assert learned(bench) == [False, False]
    assert control.status().patched


def test_no_policy_gets_a_copy_of_such_a_call_in_the_background(bench: Bench, client: Any):
    bench.patch(mode="shadow")
    with art.trajectory(learn=False):
        client.chat.completions.create(**ASK)
    with art.trajectory():
        client.chat.completions.create(**ASK)
    shadowed(bench, 1)
    assert [call.policy for call in bench.sink.calls if call.shadow_of] == [CHAMPION]
    assert len(bench.local.seen) == 1


def test_without_the_patch_an_argument_changes_nothing(client: Any):
    with art.trajectory(learn=False), art.span("s", learn=False):
        assert client.chat.completions.create(**ASK).choices
