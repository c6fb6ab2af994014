"""Whatever the engine does, the app gets an answer: upstream's, unchanged, in one record that says why."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
from dataclasses import replace
from typing import Any

import openai
import pytest

from art_patch.types import Route
from tests.support import httpx2_or_httpx as http
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK, LOCAL, LOCAL_BODY, saying, settled, streamed, whole
from tests.support.servers import TOOL_CALL, Answer, chunks, error


def good_chunks(**changes: Any) -> list[bytes]:
    return chunks(LOCAL_BODY, **changes)


LATE = "the engine did not answer in time"
EMPTY = "the engine's answer is invalid: it is empty, without text or a tool call"


def stream_saying(*deltas: Any, finish: str = "stop") -> Answer:
    """A stream with these deltas, one an event."""
    first, *_, last = good_chunks()
    frame = json.loads(first[6:])
    deltas = (*((delta, None) for delta in ({"role": "assistant", "content": ""}, *deltas)), ({}, finish))
    choices = [{"index": 0, "delta": delta, "finish_reason": reason} for delta, reason in deltas]
    return Answer(
        events=[*(b"data: " + json.dumps(frame | {"choices": [c]}).encode() + b"\n\n" for c in choices), last]
    )


WHOLE = {
    "without a word": (saying({"role": "assistant", "content": ""}), EMPTY),
    "null": (saying({"role": "assistant", "content": None, "tool_calls": [], "refusal": None}), EMPTY),
    "white space": (saying({"role": "assistant", "content": " \n\n"}), EMPTY),
    "nothing but reasoning": (
        saying({"role": "assistant", "content": None, "reasoning_content": "Well,"}, finish="length"),
        EMPTY,
    ),
    "one of two is empty": (saying({"content": "a"}, {"content": ""}), EMPTY),
    "500": (error(500), "the engine answered HTTP 500: no"),
    "503": (error(503), "the engine answered HTTP 503: no"),
    "404": (error(404), "the engine answered HTTP 404: no"),
    "429": (error(429), "the engine is full"),
    "401": (error(401), "the engine answered HTTP 401: no"),
    "400": (error(400), "the engine answered HTTP 400: no"),
    "redirect": (Answer(302, headers={"location": "http://127.0.0.1:1/"}), "the engine answered HTTP 302"),
    "204": (Answer(204), "the engine's answer is invalid: HTTP 204"),
    "html": (
        Answer(body=b"<html>", headers={"content-type": "text/html"}),
        "the engine's answer is invalid: it is not JSON",
    ),
    "empty object": (Answer(body=b"{}"), "the engine's answer is invalid: it comes from another model"),
    "list": (Answer(body=b"[]"), "the engine's answer is invalid: it is not a JSON object"),
    "no choices": (whole(choices=[]), "the engine's answer is invalid: choices are missing"),
    "no message": (whole(choices=[{"index": 0}]), "the engine's answer is invalid: a choice has no message"),
    "no finish reason": (whole(finish=None), "the engine's answer is invalid: a choice has no finish reason"),
    "other model": (whole(model="shop@2"), "the engine's answer is invalid: it comes from another model"),
    "error with 200": (
        Answer(body=b'{"error": {"message": "x"}}'),
        "the engine's answer is invalid: it holds an error",
    ),
    "cut": (Answer(body=b"{" * 100, cut=True), "the engine cannot be reached"),
    "hang": (Answer(hang=True), LATE),
    "compressed": (
        Answer(body=gzip.compress(bytes(64 << 20)), headers={"content-encoding": "gzip"}),
        "the engine's answer is invalid: it is compressed, which was not asked for",
    ),
}
STREAM = {
    "without a word": (stream_saying(), EMPTY),
    "without a word, all at once": (Answer(events=[b"".join(stream_saying().events or ())]), EMPTY),
    "white space": (stream_saying({"content": " "}, {"content": "\n"}), EMPTY),
    "error after the role": (
        Answer(events=[good_chunks()[0], b'data: {"error": {"message": "out of memory"}}\n\n']),
        "the engine's answer is invalid: it holds an error",
    ),
    "cut after the role": (Answer(events=good_chunks()[:1], cut=True), "the engine cannot be reached"),
    "unfinished after the role": (
        Answer(events=good_chunks()[:1]),
        "the engine's answer is invalid: the stream ended without a finish reason",
    ),
    "hang after the role": (
        Answer(events=good_chunks(), gate=threading.Event()),
        LATE,
    ),
    "500": (error(500), "the engine answered HTTP 500: no"),
    "html": (Answer(body=b"<html>\n"), "the engine's answer is invalid: the stream has no event"),
    "no JSON": (Answer(events=[b"data: x\n\n"]), "the engine's answer is invalid: it is not JSON"),
    "empty": (Answer(events=[]), "the engine's answer is invalid: the stream has no event"),
    "only done": (Answer(events=[b"data: [DONE]\n\n"]), "the engine's answer is invalid: the stream has no event"),
    "error first": (
        Answer(events=[b'data: {"error": {}}\n\n']),
        "the engine's answer is invalid: it comes from another model",
    ),
    "no choices": (
        Answer(events=[b'data: {"model": "shop@3", "choices": []}\n\n']),
        "the engine's answer is invalid: the first event has no choices",
    ),
    "all at once, unfinished": (
        Answer(events=[b"".join(good_chunks(finish=None))]),
        "the engine's answer is invalid: the stream ended without a finish reason",
    ),
    "compressed": (
        Answer(events=[gzip.compress(b"".join(good_chunks()))], headers={"content-encoding": "gzip"}),
        "the engine's answer is invalid: it is compressed, which was not asked for",
    ),
    "cut at once": (Answer(events=[], cut=True), "the engine cannot be reached"),
    "hang": (Answer(hang=True), LATE),
}
CASES = [(False, *case) for case in WHOLE.values()] + [(True, *case) for case in STREAM.values()]
NAMES = [f"whole-{name}" for name in WHOLE] + [f"stream-{name}" for name in STREAM]


@pytest.mark.parametrize(("stream", "answer", "reason"), CASES, ids=NAMES)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_upstream_answers(bench, client, make_async, asynchronous, stream, answer, reason):
    async def run() -> Any:
        async with make_async() as client:
            result = await client.chat.completions.create(**ASK, stream=stream)
            return [chunk async for chunk in result] if stream else result

    patience_s = 0.3 if reason == LATE else 30.0
    bench.patch(timeout_s=patience_s, first_token_timeout_s=patience_s)
    bench.local.will(answer)
    if asynchronous:
        result = asyncio.run(run())
    else:
        result = client.chat.completions.create(**ASK, stream=stream)
        result = list(result) if stream else result
    text = "".join(c.choices[0].delta.content or "" for c in result) if stream else result.choices[0].message.content
    assert text == "Hello there!"
    call = bench.sink.call
    assert (call.status, call.policy, call.fallback) == ("ok", None, reason)
    assert call.untrainable == "answered by upstream"
    (seen,) = bench.upstream.seen
    assert seen.body == ASK | {"stream": stream}
    assert len(bench.local.seen) == 1


@pytest.mark.parametrize("silent", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_no_choice_of_a_stream_is_empty(bench, client, make_async, asynchronous, silent):
    async def run() -> list[Any]:
        async with make_async() as client:
            return [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True, n=2)]

    def said(*parts: tuple[int, str, str | None]) -> Answer:
        first, *_, last = good_chunks()
        frame = json.loads(first[6:])
        choices = ({"index": at, "delta": {"content": text}, "finish_reason": end} for at, text, end in parts)
        events = (b"data: " + json.dumps(frame | {"choices": [each]}).encode() + b"\n\n" for each in choices)
        return Answer(events=[*events, last])

    def text(chunks: list[Any]) -> set[str]:
        return {choice.delta.content or "" for chunk in chunks for choice in chunk.choices}

    bench.patch()
    create = client.chat.completions.create
    ask = (lambda: asyncio.run(run())) if asynchronous else (lambda: list(create(**ASK, stream=True, n=2)))
    spoken = 1 - silent
    bench.local.will(said((spoken, "mine", None), (silent, " ", None), (spoken, "", "stop"), (silent, "", "stop")))
    assert "mine" not in text(ask())
    assert bench.sink.call.fallback == EMPTY
    bench.local.will(said((0, "mine", "stop"), (1, "and mine", "stop")))
    assert {"mine", "and mine"} <= text(ask())
    assert bench.sink.calls[-1].policy == CHAMPION


HOSTILE = "schema \x1b[31mred\x1b]0;title\x07 \u202eright-to-left; key sk-live-0123456789abcdef0123 " + "x" * 9000


@pytest.mark.parametrize("surface", ["chat", "responses"])
def test_the_engines_own_words_are_kept(bench, client, surface):
    bench.patch()
    bench.local.will(error(400, "response_format: Unimplemented keys"))
    bench.local.will(error(422, HOSTILE))
    for _ in range(2):
        if surface == "chat":
            client.chat.completions.create(**ASK)
        else:
            client.responses.create(model="m", input="hi", store=False)
    plain, hostile = (call.fallback for call in bench.sink.calls)
    assert plain == "the engine answered HTTP 400: response_format: Unimplemented keys"
    assert hostile.startswith("the engine answered HTTP 422: schema  [31mred")
    assert hostile.removesuffix("...").isprintable()
    assert "0123456789abcdef" not in hostile
    assert len(hostile) < 2100


SAYS_SOMETHING: dict[str, Any] = {
    "refusal": {"content": None, "refusal": "No."},
    "tool call": {"content": None, "tool_calls": [TOOL_CALL | {"index": 0}]},
    "text among white space": {"content": "\n a"},
    "a function call": {"content": "", "function_call": {"name": "look", "arguments": "{}"}},
}


@pytest.mark.parametrize("said", SAYS_SOMETHING.values(), ids=SAYS_SOMETHING)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_says_something_is_the_champions(bench, client, stream, said):
    bench.patch()
    bench.local.will(stream_saying(said) if stream else saying({"role": "assistant"} | said))
    result = client.chat.completions.create(**ASK, stream=stream)
    if stream:
        list(result)
    assert (bench.sink.call.policy, bench.sink.call.fallback, bench.sink.call.status) == (CHAMPION, None, "ok")


def test_reasoning_is_streamed_as_it_comes(bench, client):
    """It may take minutes, so it is shown at once; what ends after it without a word cannot be taken back."""
    gate = threading.Event()
    answer = stream_saying({"reasoning_content": "Well,"}, {"content": "yes"})
    bench.local.will(replace(answer, gate=gate, gate_after=2))
    bench.patch(timeout_s=30)
    stream = client.chat.completions.create(**ASK, stream=True)
    got = [next(stream), next(stream)]
    gate.set()
    got += stream
    assert [c.choices[0].delta.content for c in got] == ["", None, "yes", None]
    assert (bench.sink.call.policy, bench.sink.call.fallback) == (CHAMPION, None)


def test_empty_answers_count_against_the_engine_as_any_invalid_one(bench, client):
    bench.patch()
    bench.local.always = saying({"role": "assistant", "content": ""})
    for _ in range(7):
        assert client.chat.completions.create(**ASK).choices[0].message.content == "Hello there!"
    assert len(bench.local.seen) == 5


NO_PROVIDER = {"refuses the key": 401, "is overloaded": 429, "is broken": 500, "cannot be reached": None}
NOTHING = [saying({"role": "assistant", "content": ""}), saying({"role": "assistant", "content": " "})]
NOTHING_STREAMED = [stream_saying(), stream_saying({"content": " "})]


@pytest.mark.parametrize("status", NO_PROVIDER.values(), ids=NO_PROVIDER)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_where_upstream_has_no_answer_an_empty_one_is_better_than_an_error(
    bench, client, make_async, asynchronous, stream, status
):
    """The champion is asked once more, and its answer is taken as it comes."""

    upstream = bench.upstream.url if status else "http://127.0.0.1:9/v1"

    async def run() -> Any:
        async with make_async().with_options(base_url=upstream) as client:
            result = await client.chat.completions.create(**ASK, stream=stream)
            return [chunk async for chunk in result] if stream else result

    bench.patch()
    bench.local.will(*(NOTHING_STREAMED if stream else NOTHING))
    if status:
        bench.upstream.will(error(status))
    if asynchronous:
        result = asyncio.run(run())
    else:
        result = client.with_options(base_url=upstream).chat.completions.create(**ASK, stream=stream)
        result = list(result) if stream else result
    said = [c.choices[0].delta.content for c in result] if stream else result.choices[0].message.content
    assert said == (["", " ", None] if stream else " ")
    call = bench.sink.call
    assert (call.status, call.policy, call.fallback, call.error) == ("ok", CHAMPION, None, None)
    assert [choice.message for choice in call.choices] == [{"role": "assistant", "content": " "}]
    assert (len(bench.local.seen), len(bench.upstream.seen)) == (2, 1 if status else 0)


def test_where_nobody_has_an_answer_the_error_is_upstreams(bench, client):
    bench.patch()
    bench.local.will(saying({"role": "assistant", "content": ""}), error(500))
    bench.upstream.will(error(401))
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(**ASK)
    call = bench.sink.call
    assert (call.status, call.policy) == ("error", None)
    assert call.error is not None and call.error.startswith("AuthenticationError")


@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine(bench, client, stream):
    bench.route = Route(champion=CHAMPION, base_url="http://127.0.0.1:9/v1")
    bench.patch()
    result = client.chat.completions.create(**ASK, stream=stream)
    if stream:
        list(result)
    assert bench.sink.call.fallback == "the engine cannot be reached"


@pytest.mark.parametrize("times", [1, 2])
def test_an_event_loop_that_stood_still_while_connecting(bench, make_async, monkeypatch, times):
    """The timeout is the app's doing, not the engine's: tried once more with patience, and no failure of the engine.

    Whether the engine is there nevertheless, the recorder's thread finds out.
    """
    stalls = [2.4, 1.2][2 - times :]  # the last first; each more than it may take to connect

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        def stalled(sock: Any, address: Any) -> Any:
            if stalls and address[1] == int(bench.local.url.split(":")[2].removesuffix("/v1")):
                loop.call_soon(time.sleep, stalls.pop())
            return connect(sock, address)

        monkeypatch.setattr(loop, "sock_connect", stalled)
        async with make_async() as client:
            return await client.chat.completions.create(**ASK)

    monkeypatch.setattr("art_patch.patching.runtime.HEALTH_CHECK_EVERY_S", 3600)
    runtime = bench.patch(connect_timeout_s=0.5, first_token_timeout_s=1.0)
    asyncio.run(run())
    assert not stalls
    call = bench.sink.call
    expected = (CHAMPION, None) if times == 1 else (None, "the engine cannot be reached in time")
    assert (call.policy, call.fallback) == expected
    assert len(bench.local.seen) == (times == 1)
    assert runtime.breaker.closed
    assert runtime.in_doubt


def test_an_engine_in_doubt_that_is_gone_is_left_alone(bench, client, monkeypatch):
    monkeypatch.setattr("art_patch.patching.runtime.HEALTH_CHECK_EVERY_S", 0.02)
    bench.route = Route(champion=CHAMPION, base_url="http://127.0.0.1:9/v1")
    runtime = bench.patch()
    client.chat.completions.create(**ASK)  # starts the recorder's thread
    assert runtime.breaker.closed
    runtime.in_doubt = True
    deadline = time.monotonic() + 20
    while runtime.breaker.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not runtime.in_doubt


def test_breaker_opens_and_calls_go_straight_upstream(bench, client):
    runtime = bench.patch()
    bench.local.always = error(500)
    for _ in range(7):
        client.chat.completions.create(**ASK)
    assert len(bench.local.seen) == 5
    assert bench.sink.calls[-1].fallback == "the engine failed repeatedly and is left alone for a moment"
    assert "The engine failed repeatedly; calls go upstream until it recovers." in runtime.sentences()


def test_refusals_do_not_open_the_breaker(bench, client):
    bench.patch()
    bench.local.always = error(400)
    for _ in range(7):
        client.chat.completions.create(**ASK)
    assert len(bench.local.seen) == 7


def test_a_champion_just_replaced_is_looked_up(bench, client):
    bench.patch(poll_interval_s=2.0)
    bench.route = Route(champion="shop@4", base_url=bench.local.url)
    bench.local.will(error(404))
    result = client.chat.completions.create(**ASK)
    assert result.system_fingerprint == "shop@4"
    call = bench.sink.call
    assert (call.policy, call.fallback, call.untrainable) == ("shop@4", None, None)
    assert bench.upstream.seen == []


def test_both_fail(bench, client):
    bench.patch()
    bench.local.will(error(500))
    bench.upstream.will(error(429, "slow down, sk-abcdefgh12345678"))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(**ASK)
    call = bench.sink.call
    assert (call.status, call.policy, call.fallback) == ("error", None, "the engine answered HTTP 500: no")
    assert call.messages == tuple(ASK["messages"])
    assert call.params == {}
    assert "RateLimitError" in call.error
    assert "sk-abc" not in call.error


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "answer",
    [
        Answer(events=good_chunks()[:3], cut=True, gate=threading.Event(), gate_after=2),
        Answer(events=good_chunks()[:3], gate=threading.Event(), gate_after=2),
        Answer(events=good_chunks(finish=None), gate=threading.Event(), gate_after=2),
        Answer(events=[*good_chunks()[:2], b"data: {oops\n\n"], gate=threading.Event(), gate_after=2),
    ],
    ids=["cut", "no finish reason", "done without finish reason", "garbage"],
)
def test_a_stream_that_breaks_half_way_is_an_sdk_error(bench, client, make_async, answer, asynchronous):
    async def run(got: list[Any]) -> None:
        async with make_async() as client:
            async for chunk in await client.chat.completions.create(**ASK, stream=True):
                got.append(chunk)
                answer.gate.set()

    bench.patch()
    answer.gate.clear()
    bench.local.will(answer)
    got: list[Any] = []
    with pytest.raises(openai.APIConnectionError):
        if asynchronous:
            asyncio.run(run(got))
        else:
            for chunk in client.chat.completions.create(**ASK, stream=True):
                got.append(chunk)
                answer.gate.set()
    assert got
    call = bench.sink.call
    assert (call.status, call.policy, call.untrainable) == ("error", CHAMPION, "the call failed")
    assert bench.upstream.seen == []


def test_a_stream_cut_anywhere_is_put_together(bench, client):
    bench.patch()
    body = b"".join(chunks(LOCAL_BODY | {"stream_options": {"include_usage": True}})).replace(b"\n", b"\r\n")
    bench.local.will(Answer(events=[bytes([byte]) for byte in body]))
    chunks_seen = list(client.chat.completions.create(**ASK, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks_seen if c.choices) == "Hello there!"
    assert settled(bench.sink.call) == streamed(LOCAL)


def test_upstream_errors_are_the_same_object(bench, make_async):
    raised: list[Exception] = []

    class Broken(http.BaseTransport):
        def handle_request(self, request: Any) -> Any:
            raised.append(http.ConnectError("no way to sk-abcdefgh12345678"))
            raise raised[-1]

    bench.patch(mode="record")
    with openai.OpenAI(
        api_key="k", base_url="http://x/v1", max_retries=0, http_client=http.Client(transport=Broken())
    ) as client:
        with pytest.raises(openai.APIConnectionError) as caught:
            client.chat.completions.create(**ASK)
    assert caught.value.__cause__ is raised[0]
    call = bench.sink.call
    assert (call.status, call.error) == ("error", "APIConnectionError: Connection error.")
    assert call.messages == tuple(ASK["messages"])


def test_retries_of_the_sdk_are_one_call(bench):
    bench.patch(mode="record")
    bench.upstream.will(error(500))
    with openai.OpenAI(api_key="k", base_url=bench.upstream.url, max_retries=1) as client:
        client.chat.completions.create(**ASK)
    assert len(bench.upstream.seen) == 2
    assert bench.sink.call.status == "ok"


def test_the_poll_sees_a_rollback(bench, client):
    runtime = bench.patch(poll_interval_s=0.02)
    client.chat.completions.create(**ASK)
    bench.route = Route(mode="record", champion=CHAMPION, base_url=bench.local.url)
    while runtime.target.mode != "record":
        threading.Event().wait(0.01)
    client.chat.completions.create(**ASK)
    assert [call.policy for call in bench.sink.calls] == [CHAMPION, None]
