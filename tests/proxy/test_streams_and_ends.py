"""Streams flow piece by piece; a caller that goes away ends its call upstream; what breaks off breaks off."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.proxy.provider import SSE, Provider, Reply
from tests.support.proxies import Proxy, until
from tests.support.servers import Answer, StubServer, chunks

BODY: dict[str, Any] = {"model": "gpt-x", "messages": [{"role": "user", "content": "hi"}], "stream": True}
EVENTS = chunks(BODY)


Begin = Callable[..., http.client.HTTPConnection]


@pytest.fixture
def begin(proxy: Proxy) -> Iterator[Begin]:
    """Sends a request and leaves its connection open until the test is over."""
    opened: list[http.client.HTTPConnection] = []

    def send(body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPConnection:
        connection = proxy.connection()
        opened.append(connection)
        connection.request("POST", path, body=json.dumps(body), headers={"content-type": "application/json"})
        return connection

    yield send
    for connection in opened:
        connection.close()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
def test_each_event_arrives_before_the_next_is_sent(begin: Begin, path: str, proxy: Proxy, provider: Provider):
    gate = threading.Event()
    provider.will(Reply(headers=SSE, body=EVENTS, gate=gate))
    answer = begin(BODY, path).getresponse()
    assert answer.read1(100_000) == EVENTS[0]
    gate.set()
    assert answer.read() == b"".join(EVENTS[1:])
    answer.close()
    if "chat" in path:
        (call,) = proxy.calls(1)
        assert (call.status, call.choices[0].message["content"]) == ("ok", "Hello there!")
        assert call.ttft_ms is not None


def test_the_champions_events_arrive_one_by_one(begin: Begin, routed: Proxy, engine: StubServer):
    gate = threading.Event()
    answered = chunks(BODY | {"model": "agent@0", "return_token_ids": True, "logprobs": True})
    engine.will(Answer(events=answered, gate=gate, gate_after=2))
    answer = begin(BODY).getresponse()
    first = json.loads(answer.read1(100_000).partition(b"\n\n")[0].removeprefix(b"data: "))  # with the first word
    assert (first["model"], first["choices"][0]["delta"]["role"]) == ("gpt-x", "assistant")
    gate.set()
    assert b"token_ids" not in answer.read()
    answer.close()
    (call,) = routed.calls(1)
    assert (call.policy, call.untrainable) == ("agent@0", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_ends_its_call(begin: Begin, stream: bool, proxy: Proxy, provider: Provider):
    provider.will(Reply(hang=True))
    connection = begin(BODY | {"stream": stream})
    until(lambda: provider.got)
    connection.close()
    assert provider.left.wait(30)
    (call,) = proxy.calls(1)
    assert call.status == "cancelled"


def test_a_caller_that_leaves_a_stream_ends_it(begin: Begin, proxy: Proxy, provider: Provider):
    provider.will(Reply(headers=SSE, body=EVENTS, gate=threading.Event()))
    connection = begin(BODY)
    answer = connection.getresponse()
    assert answer.read1(100_000) == EVENTS[0]
    answer.close()
    connection.close()
    assert provider.left.wait(30)
    (call,) = proxy.calls(1)
    assert call.status in ("cancelled", "abandoned")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/files"])
def test_leaving_ends_what_passes_through_too(begin: Begin, path: str, proxy: Proxy, provider: Provider):
    provider.will(Reply(hang=True))
    connection = begin({"input": "x"}, path)
    until(lambda: provider.got)
    connection.close()
    assert provider.left.wait(30)


def test_leaving_in_the_middle_of_an_upload_is_nothing_to_anybody(proxy: Proxy, provider: Provider):
    for path in ("/v1/files", "/v1/chat/completions"):
        connection = proxy.connection()
        connection.putrequest("POST", path)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "1000")
        connection.endheaders(b"half of it")
        connection.close()
    assert proxy.chat()[0] == 200
    proxy.calls(1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
def test_a_stream_that_breaks_off_breaks_off_for_the_caller(begin: Begin, path: str, proxy: Proxy, provider: Provider):
    provider.will(Reply(headers=SSE, body=EVENTS[:3], cut=True))
    answer = begin(BODY, path).getresponse()
    with pytest.raises(http.client.IncompleteRead) as broken:
        answer.read()
    assert broken.value.partial == b"".join(EVENTS[:3])
    answer.close()
    if "chat" in path:
        (call,) = proxy.calls(1)
        assert call.status == "error"


def test_a_champion_that_breaks_off_is_not_spliced(begin: Begin, routed: Proxy, engine: StubServer, provider: Provider):
    answered = chunks(BODY | {"model": "agent@0", "return_token_ids": True, "logprobs": True})
    engine.will(Answer(events=answered[:3], cut=True))
    answer = begin(BODY).getresponse()
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    answer.close()
    assert provider.got == []
    (call,) = routed.calls(1)
    assert (call.status, call.policy) == ("error", "agent@0")


def test_a_provider_that_hangs_up_is_a_bad_gateway(proxy: Proxy, provider: Provider):
    pool = ThreadPoolExecutor(1)
    for path in ("/v1/chat/completions", "/v1/models"):
        provider.will(Reply(hang=True))
        found: Future[tuple[int, dict[str, str], bytes]] = pool.submit(proxy.ask, "POST", path, json.dumps(BODY))
        until(lambda: provider.got)
        provider.over.set()
        status, _, body = found.result(30)
        provider.reset()
        assert status == 502
        assert "upstream" in json.loads(body)["error"]["message"]
    pool.shutdown()
    (call,) = proxy.calls(1)
    assert call.status == "error"
