"""What passes through: the provider gets what the caller sent, the caller gets what the provider sent."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import pytest

from tests.proxy.provider import SSE, Provider, Reply
from tests.support.proxies import KEY, Proxy

ASKED = b'{ "model":"gpt-x",\n "messages":[{"role":"user","content":"h\xc3\xa9\\ud800"}], "seed":1e3, "seed":7 }'
JSON_TYPE = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (200, "application/json", b'{"id": "x",  "choices": [ ]}'),
        (200, "text/html", b"<html>not an answer</html>"),
        (400, "application/json", b'{"error": {"message": "bad", "type": "t", "param": null, "code": "c"}}'),
        (401, "application/json; charset=utf-8", b'{"error": {"message": "no such key"}}'),
        (404, "text/plain", b"nothing here"),
        (429, "application/json", b'{"error": {"message": "slow down"}}'),
        (500, "text/html", b"<h1>Internal"),
        (503, "application/json", b""),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
def test_answers_arrive_as_they_are(
    status: int, kind: str, body: bytes, path: str, stream: bool, proxy: Proxy, provider: Provider
):
    headers = [("Content-Type", kind), ("X-Request-Id", "req-1"), ("Retry-After", "0"), ("x-ratelimit-left", "3")]
    provider.will(Reply(status, headers, body))
    asked = json.dumps({"model": "m", "messages": [], "input": "", "prompt": "", "stream": stream})
    got_status, got_headers, got_body = proxy.ask("POST", path, asked, JSON_TYPE)
    assert (got_status, got_body) == (status, body)
    assert len(provider.got) == 1  # whoever wants to try again is the caller
    framing = {name: got_headers.pop(name, None) for name in ("content-length", "transfer-encoding")}
    assert framing["transfer-encoding"] == "chunked" or framing["content-length"] == str(len(body))
    assert got_headers == {name.lower(): value for name, value in headers}
    if path != "/v1/embeddings":
        proxy.calls(1)


def test_requests_arrive_as_they_are(proxy: Proxy, provider: Provider):
    sent = {
        "Authorization": f"Bearer {KEY}",
        "OpenAI-Organization": "org-1",
        "OpenAI-Project": "proj-1",
        "X-Custom": "mine",
        "X-Stainless-Retry-Count": "2",
        "User-Agent": "my-app/1.0",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "Idempotency-Key": "once",
        "Cookie": "mine=1",
    }
    hops = {"Connection": "keep-alive, X-Hop", "X-Hop": "a", "TE": "trailers", "Proxy-Authorization": "Basic x"}
    ours = {"X-Art-Session-Id": "s1", "x-art-key": "k"}
    assert proxy.ask("POST", "/v1/chat/completions", ASKED, sent | hops | ours)[0] == 200
    (got,) = provider.got
    assert got.body == ASKED
    known = {"host", "connection", "content-length", "accept-encoding"}
    assert {name.lower(): value for name, value in got.headers if name.lower() not in known} == {
        name.lower(): value for name, value in sent.items()
    }
    assert got.header("connection") == "keep-alive"
    assert got.header("host") == provider.url.split("/")[2]
    (call,) = proxy.calls(1)
    assert KEY not in repr(call)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
def test_a_caller_without_a_key_sends_none(path: str, proxy: Proxy, provider: Provider):
    connection = proxy.connection()
    connection.request("POST", path, ASKED, JSON_TYPE)
    connection.getresponse().read()
    connection.close()
    (got,) = provider.got
    assert got.names == {"host", "connection", "content-length", "content-type", "accept-encoding"}
    if path.endswith("completions"):
        proxy.calls(1)


def test_the_callers_key_is_nowhere_in_the_store(proxy: Proxy, provider: Provider):
    proxy.chat()
    provider.will(Reply(401, body=b'{"error": {"message": "Incorrect API key"}}'))
    proxy.chat(stream=True)
    proxy.calls(2)
    path = proxy.store_url.removeprefix("sqlite:///")
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(path + suffix):
            with open(path + suffix, "rb") as file:
                assert KEY.encode() not in file.read()


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'{"messages": []}', b'{"model": 3}', b"[" * 100_000])
def test_what_is_no_call_is_for_the_provider_to_refuse(body: bytes, proxy: Proxy, provider: Provider):
    refusal = b'{"error": {"message": "not like this"}}'
    provider.will(Reply(400, body=refusal))
    assert proxy.ask("POST", "/v1/chat/completions", body)[::2] == (400, refusal)
    (got,) = provider.got
    assert got.body == body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accepts", ["gzip, br", "identity"])
def test_compressed_answers_can_be_read(stream: bool, accepts: str, proxy: Proxy, provider: Provider):
    body = json.dumps({"choices": [{"index": 0, "message": {"content": "x" * 5000}, "finish_reason": "stop"}]}).encode()
    coding = [("content-type", "application/json"), ("content-encoding", "gzip")]
    packed = gzip.compress(body)
    provider.will(Reply(200, coding, [packed[:20], packed[20:]] if stream else packed))
    _, headers, got = proxy.chat({"accept-encoding": accepts}, stream=stream)
    assert (gzip.decompress(got) if "content-encoding" in headers else got) == body
    assert provider.got[0].header("accept-encoding") == ("gzip" if "gzip" in accepts else "identity")
    proxy.calls(1)


def test_cookies_stay_with_their_caller(proxy: Proxy, provider: Provider):
    cookies = [("content-type", "application/json"), ("set-cookie", "session=a; Path=/"), ("set-cookie", "b=2")]
    for path in ("/v1/chat/completions", "/v1/models"):
        provider.will(Reply(headers=cookies))
        assert proxy.ask("POST", path, ASKED)[1]["set-cookie"] == "b=2"
        proxy.ask("POST", path, ASKED)
        assert "cookie" not in provider.got[-1].names
    proxy.calls(2)


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "PUT", "PATCH", "OPTIONS"])
def test_every_method_passes(method: str, proxy: Proxy, provider: Provider):
    provider.will(Reply(202, [("content-type", "text/x"), ("x-a", "b")], b"\x00\xff body"))
    status, headers, body = proxy.ask(method, "/v1/files/a%2Fb%20c?after=x%26y&limit=2&limit=3")
    assert (status, headers["content-type"], headers["x-a"]) == (202, "text/x", "b")
    assert body == (b"" if method == "HEAD" else b"\x00\xff body")
    (got,) = provider.got
    assert (got.method, got.target) == (method, "/v1/files/a%2Fb%20c?after=x%26y&limit=2&limit=3")
    assert "transfer-encoding" not in got.names
    assert got.body == b""


def test_redirects_are_the_callers_to_follow(proxy: Proxy, provider: Provider):
    for path in ("/v1/chat/completions", "/v1/files/f/content"):
        provider.will(Reply(307, [("location", "http://elsewhere.invalid/")], b""))
        status, headers, _ = proxy.ask("POST", path, ASKED)
        assert (status, headers["location"]) == (307, "http://elsewhere.invalid/")
    assert len(provider.got) == 2
    proxy.calls(1)


def test_uploads_and_downloads_pass_to_the_byte(proxy: Proxy, provider: Provider):
    upload = (
        b"--b\r\ncontent-disposition: form-data; name=file; filename=a\r\n\r\n" + os.urandom(300_000) + b"\r\n--b--"
    )
    sound = os.urandom(400_000)
    provider.will(Reply(200, [("content-type", "audio/mpeg")], [sound[:1000], sound[1000:]]))
    kind = {"content-type": "multipart/form-data; boundary=b"}
    _, headers, body = proxy.ask("POST", "/v1/audio/transcriptions", upload, kind)
    assert (headers["content-type"], body) == ("audio/mpeg", sound)
    (got,) = provider.got
    assert (got.header("content-type"), got.body) == (kind["content-type"], upload)
    assert got.header("content-length") == str(len(upload))


def test_a_body_of_unknown_length_streams_through(proxy: Proxy, provider: Provider):
    provider.will(Reply())
    connection = proxy.connection()
    connection.request("POST", "/v1/files", body=iter([b"one ", b"two ", b"three"]), encode_chunked=True)
    assert connection.getresponse().read() == b"{}"
    connection.close()
    assert provider.got[0].body == b"one two three"
    assert provider.got[0].header("transfer-encoding") == "chunked"


@pytest.mark.slow
def test_fifty_megabytes_are_passed_on(proxy: Proxy, provider: Provider):
    text = "x" * 50_000_000
    assert proxy.chat(messages=[{"role": "user", "content": text}])[0] == 200  # and it is not recorded
    assert len(provider.got[0].body) > 50_000_000
    provider.will(Reply(body=json.dumps({"choices": [], "padding": text}).encode()))
    status, _, body = proxy.chat()
    assert (status, json.loads(body)["padding"]) == (200, text)
    proxy.calls(1)


@pytest.mark.parametrize("path", ["/v1/../admin", "/v1/a/%2e%2e/b", "/v1/./models"])
def test_nobody_climbs_out(path: str, proxy: Proxy, provider: Provider):
    assert proxy.ask("GET", path)[0] in (400, 404)
    assert provider.got == []


def test_other_addresses_are_not_served(proxy: Proxy, provider: Provider):
    status, _, body = proxy.ask("GET", "/chat/completions")
    assert status == 404
    assert "/v1/" in json.loads(body)["error"]["message"]
    assert provider.got == []


def test_streams_arrive_to_the_byte(proxy: Proxy, provider: Provider):
    events: list[Any] = [b": comment\n\n", b'data: {"a":\r\n\r\n', b"\xff not utf-8\n\n", b"data: [DONE]\n\n"]
    provider.will(Reply(headers=SSE, body=events))
    status, headers, body = proxy.chat(stream=True)
    assert (status, headers["content-type"], body) == (200, SSE[0][1], b"".join(events))
    proxy.calls(1)
