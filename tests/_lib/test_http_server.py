"""What the server does before a request reaches an application."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from art_patch._lib import http_server


async def hello(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    names = b",".join(name for name, _ in scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(names))]})
    await send({"type": "http.response.body", "body": names})


@contextmanager
def serving() -> Iterator[int]:
    stop, ready = threading.Event(), threading.Event()
    sock = http_server.listen("127.0.0.1", 0, key=None, what="nothing")
    thread = threading.Thread(
        target=http_server.serve, args=(hello, sock), kwargs={"drain_s": 1, "on_ready": ready.set, "stop": stop}
    )
    thread.start()
    try:
        assert ready.wait(30)
        yield sock.getsockname()[1]
    finally:
        stop.set()
        thread.join(30)
        sock.close()


def ask(port: int, kept: http.client.HTTPConnection | None = None) -> int:
    connection = kept or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    if kept is None:
        connection.close()
    return answer.status


def test_half_headers_on_every_connection_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_connections", lambda: 4)
    with serving() as port:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for sock in held:
            sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert [ask(port) for _ in range(8)] == [200] * 8
        for sock in held[:10]:  # the oldest made room
            sock.settimeout(30)
            with suppress(ConnectionResetError):
                assert sock.recv(10) == b""
        for sock in held:
            sock.close()


@pytest.mark.parametrize("kept", [False, True], ids=["at first", "after an answer"])
def test_half_a_header_is_not_waited_for(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEADER_S", 0.2)
    with serving() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.connect()
        if kept:
            assert ask(port, connection) == 200
        connection.sock.sendall(b"GET / HTTP/1.1\r\nX: ")
        with suppress(ConnectionResetError):
            assert connection.sock.recv(10) == b""
        connection.close()


def test_a_body_that_does_not_go_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_PART_S", 0.2)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12")
        with suppress(ConnectionResetError):
            assert sock.recv(10) == b""


def test_a_caller_who_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        leaves = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            await asyncio.sleep(0)
            if leaves.done():
                return gone.set()

    monkeypatch.setattr(http_server, "_PART_S", 0.2)
    monkeypatch.setattr(f"{__name__}.hello", endless)
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert gone.wait(30)


def test_what_comes_behind_a_body_is_no_header() -> None:
    with serving() as port, socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Art-Key: y\r\n\r\n")
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.read() == b"host,transfer-encoding"
