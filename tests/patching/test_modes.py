"""Which calls are ours, and whom they reach: match, canary, shadow, sample_rate, wrap, suppress, redact."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import openai
import pytest

import art_patch as art
from art_patch.errors import ConfigError
from art_patch.patching import control, status, unpatch
from art_patch.store import open_store
from art_patch.types import Call, Choice, Route, Score, TrajectoryInfo
from tests.support.patched_sdk import CHAMPION, shadowed
from tests.support.sdk_samples import ASK, LOCAL, MESSAGES, UPSTREAM, settled
from tests.support.servers import Answer, error


def test_match(bench, client):
    for match, hits in (
        ("gpt-*", {"gpt-x", "gpt-y"}),
        ("gpt-y", {"gpt-y"}),
        ("re:-x$", {"gpt-x"}),
        (re.compile("^o"), {"other"}),
        (lambda body: len(body["messages"]) == 1, {"gpt-x", "gpt-y", "other"}),
        (lambda body: body["nothing"], set()),
    ):
        bench.sink.records.clear()
        bench.local.reset()
        bench.patch(match=match)
        for model in ("gpt-x", "gpt-y", "other"):
            client.chat.completions.create(model=model, messages=MESSAGES)
        assert {call.requested_model for call in bench.sink.calls} == hits
        assert len(bench.local.seen) == len(hits)
    assert status().errors == {"match": 3}
    bench.expects_faults = True


def test_a_match_function_cannot_change_the_request(bench, client):
    bench.patch(match=lambda body: body.pop("messages"))
    client.chat.completions.create(**ASK)
    assert bench.upstream.seen[0].body["messages"] == MESSAGES
    assert status().errors == {"match": 1}
    bench.expects_faults = True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "on"}, "'off', 'record', 'shadow', 'canary' or 'route'"),
        ({"match": "re:("}, "not a regular expression"),
        ({"match": 3}, "give a glob"),
        ({"redact": "everything"}, "give 'secrets' or a function"),
        ({"sample_rate": 2}, "less than or equal to 1"),
        ({"base_url": "localhost:8000"}, "write it like http://"),
        ({"store": "mysql://x"}, "write a path, sqlite:////"),
        ({"project": "a b"}, "ART_PATCH_PROJECT"),
    ],
)
def test_mistakes_are_raised_with_the_fix(bench, arguments, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        art.patch(**arguments)
    assert not status().patched


def test_canary_by_session(bench, client):
    bench.patch(mode="canary", canary_percent=30)
    for session in range(60):
        for _ in range(2):
            with art.trajectory(session_id=f"s{session}"):
                client.chat.completions.create(**ASK)
    calls = bench.sink.calls
    infos = {r.id: r for r in bench.sink.records if isinstance(r, TrajectoryInfo)}
    by_session: dict[str | None, set[str | None]] = {}
    for call in calls:
        by_session.setdefault(infos[call.trajectory_id].session_id, set()).add(call.policy)
    assert len(by_session) == 60
    assert all(len(policies) == 1 for policies in by_session.values())
    assert 6 <= sum(policies == {CHAMPION} for policies in by_session.values()) <= 30
    assert {call.fallback for call in calls} == {None}


def test_a_conversation_without_context_stays_on_its_side(bench, client):
    bench.patch(mode="canary", canary_percent=50)
    sides = Counter()
    for number in range(40):
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": f"q{number}"}]
        before = len(bench.local.seen)
        for _ in range(3):
            answer = client.chat.completions.create(model="gpt-x", messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
        sides[len(bench.local.seen) - before] += 1
    assert set(sides) == {0, 3}


def test_canary_follows_the_store(bench, client):
    bench.patch()
    for percent, policy in ((0.0, None), (100.0, CHAMPION)):
        bench.route = replace(bench.route, mode="canary", canary_percent=percent)
        control._process.runtime.poll()
        client.chat.completions.create(**ASK)
        assert bench.sink.calls[-1].policy == policy
    assert status().mode == "canary"


@pytest.mark.parametrize("stream", [False, True])
def test_shadow(bench, client, stream):
    bench.patch(mode="shadow")
    with art.trajectory("refund", scenario="r1", session_id="s") as mine:
        result = client.chat.completions.create(**ASK, temperature=0.5, stream=stream)
        if stream:
            list(result)
    assert bench.sink.calls
    shadowed(bench, 1)
    seen, shadow = bench.sink.calls
    assert (seen.policy, seen.shadow_of, seen.trajectory_id) == (None, None, mine.id)
    assert settled(shadow) == replace(LOCAL, params={"temperature": 0.5}, shadow_of=seen.id)
    infos = {r.id: r for r in bench.sink.records if isinstance(r, TrajectoryInfo) and r.origin == "shadow"}
    info = infos[shadow.trajectory_id]
    assert (info.name, info.scenario_key, info.session_id) == ("refund", "r1", "s")
    assert [s.headers["authorization"] for s in bench.local.seen] == ["Bearer none"]
    assert (status().shadowed, status().shadow_skipped, status().shadow_failed) == (1, 0, 0)


def test_shadow_has_a_budget(bench, client):
    bench.patch(mode="shadow", shadow_per_minute=2)
    for _ in range(5):
        client.chat.completions.create(**ASK)
    assert len([c for c in bench.sink.calls if c.shadow_of is None]) == 5
    shadowed(bench, 2)
    assert status().shadow_skipped == 3
    assert len(bench.local.seen) == 2


def test_a_failing_shadow_is_recorded_and_opens_the_breaker(bench, client):
    bench.local.always = error(500)
    bench.patch(mode="shadow")
    for _ in range(5):
        client.chat.completions.create(**ASK)
    assert bench.sink.calls
    shadowed(bench, 5)
    client.chat.completions.create(**ASK)
    calls = bench.sink.calls
    assert Counter((c.policy, c.status) for c in calls) == {(None, "ok"): 6, (CHAMPION, "error"): 5}
    deadline = time.monotonic() + 20
    while not status().shadow_skipped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert status().shadow_skipped == 1
    assert len(bench.local.seen) == 5


def test_nothing_that_waits_is_asked_after_unpatch(bench, client):
    bench.local.will(Answer(hang=True))
    bench.patch(mode="shadow")
    for _ in range(4):
        client.chat.completions.create(**ASK)
    assert len([call for call in bench.sink.calls if call.shadow_of is None]) == 4
    deadline = time.monotonic() + 20
    while not bench.local.seen and time.monotonic() < deadline:
        time.sleep(0.01)
    unpatch()
    bench.local.released.set()
    for thread in threading.enumerate():
        if thread.name == "art_patch-shadow":
            thread.join(30)
    assert len(bench.local.seen) == 1
    assert (status().shadowed, status().shadow_failed, status().shadow_skipped) == (0, 1, 3)
    bench.patch(mode="shadow")
    client.chat.completions.create(**ASK)
    assert bench.sink.calls
    shadowed(bench, 1)


def test_only_what_could_be_routed_is_shadowed(bench, client):
    bench.patch(mode="shadow")
    client.chat.completions.create(**ASK, store=True)
    assert len(bench.sink.calls) == 1
    bench.route = Route()
    control._process.runtime.poll()
    client.chat.completions.create(**ASK)
    assert len(bench.sink.calls) == 2
    assert bench.local.seen == []
    assert status().shadowed == status().shadow_skipped == 0


def test_sample_rate_keeps_whole_trajectories(bench, client):
    bench.patch(mode="record", sample_rate=0.4)
    for number in range(50):
        with art.trajectory(id=f"t{number}"):
            client.chat.completions.create(**ASK)
            client.chat.completions.create(**ASK)
            art.reward(1.0)
    counts = Counter(call.trajectory_id for call in bench.sink.calls)
    assert 8 <= len(counts) <= 35
    assert set(counts.values()) == {2}
    for kind in (TrajectoryInfo, Score):
        owners = {getattr(r, "trajectory_id", None) or r.id for r in bench.sink.records if isinstance(r, kind)}
        assert owners == set(counts)
    assert status().dropped == 0


def test_suppress(bench, client, make_async):
    bench.patch()
    with art.trajectory(), art.suppress():
        client.chat.completions.create(**ASK)
        art.score("thumbs", 1.0)
    with art.suppress(), art.trajectory():
        client.chat.completions.create(**ASK)

    @art.suppress()
    async def judge() -> None:
        async with make_async() as other:
            await other.chat.completions.create(**ASK)

    asyncio.run(judge())
    client.chat.completions.create(**ASK)
    assert settled(bench.sink.call) == LOCAL
    assert len(bench.upstream.seen) == 3
    assert [r.name for r in bench.sink.records if isinstance(r, Score)] == ["thumbs"]


def stored(home: Any) -> list[Call]:
    assert art.flush(10)
    store = open_store(f"sqlite:///{home / 'default' / 'store.db'}")
    calls = [call for trajectory in store.read.recent() for call in trajectory.calls]
    store.close()
    return calls


def test_wrap_is_for_one_client_and_its_copies(bench, client, tmp_path):
    with openai.OpenAI(api_key="k", base_url=bench.upstream.url, max_retries=0) as other:
        assert art.wrap(client, home=tmp_path) is client
        other.chat.completions.create(**ASK)
        other.with_options(timeout=3).chat.completions.create(**ASK)
        client.chat.completions.create(**ASK)
        client.with_options(timeout=3).chat.completions.create(**ASK)
        again = client.copy().with_options(max_retries=0)
        assert type(again) is openai.OpenAI
        again.chat.completions.create(**ASK)
        assert len(stored(tmp_path)) == 3
        art.unpatch()
        client.chat.completions.create(**ASK)
        again.chat.completions.create(**ASK)
        assert len(stored(tmp_path)) == 3
    assert len(bench.upstream.seen) == 7


def test_wrap_after_patch_changes_nothing(bench, client, tmp_path):
    art.patch(home=tmp_path, mode="record")
    art.wrap(client)
    with openai.OpenAI(api_key="k", base_url=bench.upstream.url, max_retries=0) as other:
        other.chat.completions.create(**ASK)
    assert len(stored(tmp_path)) == 1
    assert status().mode == "record"


def test_wrap_says_what_it_takes():
    with pytest.raises(ConfigError, match="client of the OpenAI SDK, not str"):
        art.wrap("client")
    with openai.OpenAI(api_key="k") as client, pytest.raises(ConfigError, match="knows no colour"):
        art.wrap(client, colour="red")
    assert not status().patched


SECRET = "sk-canary-4f3c9a7e21b8"


def test_redacted_secrets(bench, client):
    bench.patch(redact="secrets")
    messages: list[Any] = [{"role": "user", "content": f"my key is {SECRET}"}]
    with art.trajectory(SECRET, metadata={"k": [SECRET]}, tags=[SECRET]):
        client.chat.completions.create(model="gpt-x", messages=messages)
        art.score("thumbs", 1.0, comment=SECRET)
    call = bench.sink.call
    assert SECRET not in repr(bench.sink.records)
    assert call.messages == ({"role": "user", "content": "my key is ***"},)
    assert bench.local.seen[0].body["messages"] == messages
    assert (call.prompt_token_ids, call.choices[0].token_ids, call.choices[0].logprobs) == (None, None, None)
    assert call.untrainable == "it was redacted"
    client.chat.completions.create(**ASK)
    assert settled(bench.sink.calls[-1]) == LOCAL


def test_redacted_by_a_function(bench, client):
    bench.patch(mode="record", redact=lambda text: text.replace("Hello", "Goodbye"))
    client.chat.completions.create(**ASK)
    choice = Choice(0, UPSTREAM.choices[0].message | {"content": "Goodbye there!"}, "stop")
    assert settled(bench.sink.call) == replace(UPSTREAM, choices=(choice,))


@pytest.mark.parametrize("hook", [lambda text: 1 / 0, lambda text: None])
def test_what_cannot_be_redacted_is_not_stored(bench, client, hook):
    bench.expects_faults = True
    bench.patch(redact=lambda text: hook(text) if text == "hi" else text)
    with art.trajectory():
        client.chat.completions.create(**ASK)
        client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "ok"}])
    (call,) = bench.sink.calls
    assert call.messages[0]["content"] == "ok"
    assert next(r.id for r in bench.sink.records if isinstance(r, TrajectoryInfo)) == call.trajectory_id
    assert status().dropped == 1
    assert "1 call not recorded, because redaction failed; mend the function that `redact` names." in status().degraded
    assert status().errors == {"redact": 1}
