"""f15, f16, s11: payloads that are huge, or that no JSON library likes. No call fails, every row is readable."""

from __future__ import annotations

import base64
import gc
import json
import os
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import art_patch as art
from tests.support.apps import FULL, App, Store

LARGE = 50_000_000


def picture(size: int) -> str:
    return "data:image/png;base64," + base64.b64encode(os.urandom(size * 3 // 4)).decode()


def asks(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


class Accepting(httpx.BaseTransport):
    """A double of the network: reading 50 MB of JSON in this very process would drown what is measured."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "seen"}}
        return httpx.Response(200, json={"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                                         "choices": [choice]}, request=request)  # fmt: skip


@pytest.mark.slow
def test_f15_s11_fifty_megabytes_of_media_and_ten_of_text(app: App, store: Store, figure):
    took: dict[str, list[float]] = {"bare": [], "patched": []}
    url, text = picture(LARGE), "some words, " * 850_000
    with openai.OpenAI(
        api_key="k", base_url="http://x/v1", max_retries=0, http_client=httpx.Client(transport=Accepting())
    ) as client:

        def ask(phase: str, messages: list[Any]) -> None:
            begun = time.perf_counter()
            client.chat.completions.create(model="m", messages=messages)
            took[phase].append(time.perf_counter() - begun)

        picture_part = {"type": "image_url", "image_url": {"url": url}}
        sound = {"type": "input_audio", "input_audio": {"format": "wav", "data": url.partition(",")[2]}}
        for _ in range(3):
            ask("bare", asks([picture_part]))
        app.patch(queue_mib=256)
        for _ in range(3):
            ask("patched", asks([picture_part]))
            assert art.flush(60)
        ask("patched", asks([sound]))
        ask("patched", asks(text))
        # How long the app's threads are kept waiting while the background reads all this.
        pauses: list[float] = []
        done = threading.Event()

        def watch() -> None:
            before = time.perf_counter()
            while not done.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                pauses.append(now - before)
                before = now

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert art.flush(120)
        done.set()
        watcher.join()
    assert art.status().recorded == store.count() == 5
    assert art.status().dropped == 0
    with store.opened() as opened:
        calls = sorted((call for one in opened.read.recent() for call in one.calls), key=lambda call: call.started_at)
    kept = calls[0].messages[0]["content"][0]["image_url"]["url"]
    assert kept.startswith("data:image/png;base64,sha256:") and kept.endswith(f";bytes={len(url) - 22}")
    assert calls[3].messages[0]["content"][0]["input_audio"]["data"] == kept.partition(",")[2]
    assert calls[4].messages[0]["content"] == text
    assert store.path.stat().st_size < 3 << 20
    bare, patched = min(took["bare"]) * 1000, min(took["patched"][:3]) * 1000
    figure("f15 50 MB base64: bare call / added to the caller, ms (best of 3)", f"{bare:.1f} / {patched - bare:.1f}",
           "added <= 5")  # fmt: skip
    figure("f15 longest pause of another thread meanwhile, ms", round(max(pauses) * 1000, 1))


def test_f15_a_call_whose_media_were_replaced_is_not_trainable(app: App, store: Store, local):
    from art_patch.patching import control
    from art_patch.settings import Settings
    from art_patch.types import Route

    route = Route(champion="shop@3", base_url=local.url)
    control.start(Settings(store=store.url, flush_interval_s=0.01), read_route=lambda *_: route)
    app.client.chat.completions.create(
        model="m", messages=asks([{"type": "image_url", "image_url": {"url": picture(50_000)}}])
    )
    app.call("plain")
    assert art.flush(30)
    with store.opened() as opened:
        calls = sorted((call for one in opened.read.recent() for call in one.calls), key=lambda call: call.started_at)
    assert [call.policy for call in calls] == ["shop@3", "shop@3"]
    assert [call.untrainable for call in calls] == ["the prompt holds an image, audio or file", None]
    assert calls[0].choices[0].token_ids


def deep(levels: int) -> Any:
    value: Any = "bottom"
    for _ in range(levels):
        value = [value]
    return value


ODD = {
    "surrogate": asks("lone \ud800 surrogate"),
    "nul": asks("a\x00b\u2028c\ufeff"),
    "2**70": asks([{"type": "text", "text": "x", "number": 2**70}]),
    "-2**200": asks([{"type": "text", "text": "x", "number": -(2**200)}]),
    "nan": asks([{"type": "text", "text": "x", "number": float("nan")}]),
    "infinity": asks([{"type": "text", "text": "x", "number": float("inf")}]),
    "int keys": asks([{"type": "text", "text": "x", 1: {2: 3}, None: 4, False: 5}]),
    "bytes": asks([{"type": "text", "text": b"raw"}]),
    "set": asks([{"type": "text", "text": {1, 2}}]),
    "object": asks([{"type": "text", "text": object()}]),
    "depth 200": asks([{"type": "text", "text": "x", "deep": deep(200)}]),
    "depth 2000": asks([{"type": "text", "text": "x", "deep": deep(2000)}]),
    "not a list": "no messages at all",
    "not objects": [1, None, "text", [], {"role": "user", "content": "x"}],
    "empty": [],
    "a million messages' worth": asks("x") * 3000,
}


def outcome(client: Any, messages: Any) -> str:
    try:
        return str(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("odd", ODD)
def test_f16_odd_requests(app: App, store: Store, upstream, figure, odd):
    """The same result as without us, and a row for each call that got as far as the network."""
    bare = outcome(app.client, ODD[odd])
    sent = len(upstream.seen)
    app.patch()
    assert outcome(app.client, ODD[odd]) == bare
    assert art.flush(30)
    assert len(upstream.seen) == 2 * sent
    assert store.count() == 1
    assert store.problems() == []
    with store.opened() as opened:
        (found,) = opened.read.recent()
    assert len(found.calls) == 1
    assert art.status().errors == {}


ANSWERS = {
    "NaN": b'{"choices": [{"message": {"content": "x", "n": NaN, "i": -Infinity}, "finish_reason": "stop"}]}',
    "surrogate": b'{"choices": [{"message": {"content": "\\ud800", "role": "\\udfff"}, "finish_reason": "\\ud800"}]}',
    "not UTF-8": b'{"choices": [{"message": {"content": "\xff\xfe"}, "finish_reason": "stop"}]}',
    "huge number": b'{"choices": [], "usage": {"prompt_tokens": ' + b"9" * 100 + b', "completion_tokens": 1e400}}',
    "number beyond Python's limit": b'{"choices": [], "usage": {"prompt_tokens": ' + b"9" * 5000 + b"}}",
    "deep": b'{"choices": [{"message": {"content": "x", "deep": ' + b"[" * 2000 + b"]" * 2000 + b"}}]}",
    "very deep": b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "types": b'{"choices": {"a": [1]}, "usage": [], "model": {}, "prompt_token_ids": "x"}',
    "choice types": b'{"choices": [1, null, {"index": "x", "message": 3, "finish_reason": [], "token_ids": [1.5]}]}',
    "empty": b"",
    "nothing": b"null",
}


@pytest.mark.parametrize("odd", ANSWERS)
@pytest.mark.parametrize("stream", [False, True])
def test_f16_odd_answers(app: App, store: Store, upstream, odd, stream):
    from tests.support.servers import Answer

    raw = ANSWERS[odd]
    answer = Answer(events=[b"data: " + raw + b"\n\n", b"data: [DONE]\n\n"]) if stream else Answer(body=raw)

    def ask() -> str:
        upstream.will(answer)
        try:
            result = app.client.chat.completions.create(model="m", messages=asks("x"), stream=stream)
            return repr([chunk.model_dump() for chunk in result]) if stream else repr(result)
        except (Exception, RecursionError) as error:
            return type(error).__name__

    bare = ask()
    # A stream that raised is left half read, and ends with its last reference. If that is found while httpcore holds
    # the lock of its pool, which closing the stream takes, too, the SDK waits for itself.
    gc.collect()
    app.patch()
    assert ask() == bare
    gc.collect()
    assert art.flush(30)
    assert store.count() == 1
    assert store.problems() == []
    assert art.status().errors == {}


NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(2**60, 2**80))
TEXTS = st.text(st.characters(), max_size=30)  # lone surrogates included
KEYS = st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
DEEP = [deep(150), deep(250), deep(700), deep(1200)]
JSONISH = st.recursive(
    st.one_of(TEXTS, NUMBERS, st.booleans(), st.none(), st.binary(max_size=10), st.sampled_from(DEEP)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "system", "tool", "assistant"]), "content": JSONISH},
            optional={"name": JSONISH, "tool_calls": JSONISH},
        ),
        JSONISH,
    ),
    max_size=3,
)
CASES = 2_000 if FULL else 500


@pytest.mark.slow
def test_s11_fuzz(store: Store, figure):
    """Requests and answers made up by hypothesis, through the SDK, the recorder and the store."""
    answers: list[bytes] = []

    class Answering(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, content=answers[-1], headers={"content-type": "application/json"})

    seen = {"cases": 0, "sent": 0}
    with openai.OpenAI(
        api_key="k", base_url="http://x/v1", max_retries=0, http_client=httpx.Client(transport=Answering())
    ) as client:
        art.patch(store=store.url, mode="record", flush_interval_s=0.05)

        def result(messages: Any) -> str:
            try:
                return repr(client.chat.completions.create(model="m", messages=messages, temperature=0.5))
            except Exception as error:
                return type(error).__name__

        @settings(
            max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
        )
        @given(MESSAGES, JSONISH, st.booleans())
        def fuzz(messages: Any, content: Any, whole: bool) -> None:
            seen["cases"] += 1
            message = {"role": "assistant", "content": content}
            body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]} if whole else content
            answers.append(json.dumps(body, default=repr, skipkeys=True).encode())
            result(messages)

        try:
            fuzz()
            assert art.flush(120)
            assert art.status().recorded + art.status().dropped == seen["cases"] >= CASES
            assert art.status().dropped == 0
            assert art.status().errors == {}
        finally:
            art.unpatch()
    assert store.count() == seen["cases"]
    assert store.problems() == []
    with store.opened() as opened:
        readable = sum(len(one.calls) for one in opened.read.recent(limit=100_000))
    assert readable == seen["cases"]
    figure("s11 fuzz: cases, exceptions, rows readable", f"{seen['cases']}, 0, {readable}", f"{CASES}, 0, all")
