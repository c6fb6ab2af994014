"""The job's client of an engine: its key and its prompts go to the engine's address and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from art_patch.errors import EngineError
from art_patch.serving import EngineClient, contract

SECRET = "TOP-SECRET-TOKEN"


class Server(ThreadingHTTPServer):
    """Answers each request with one status, headers and body, and remembers what came."""

    def __init__(self, status: int = 200, body: bytes = b"{}", **headers: str) -> None:
        self.seen: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                length = int(self.headers.get("content-length", 0))
                server.seen.append(f"{self.path} {self.headers} {self.rfile.read(length)!r}")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

        server = self
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def elsewhere() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_gets_neither_key_nor_prompt(elsewhere: Server, status: int):
    engine = Server(status, Location=f"{elsewhere.url}/health")
    try:
        with EngineClient(engine.url, SECRET) as client:
            assert not client.health()
            assert client.answers()
            for call in (client.models, lambda: client.chat(messages=[]), lambda: client.load("agent@1")):
                with pytest.raises(EngineError, match=str(status)):
                    call()
        assert len(engine.seen) == 5
        assert all(SECRET in seen for seen in engine.seen)
        assert elsewhere.seen == []
    finally:
        engine.close()


def test_a_proxy_of_the_environment_gets_neither_key_nor_prompt(elsewhere: Server, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, elsewhere.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    engine = Server(200, b'{"data": [], "choices": []}', **{"content-type": "application/json"})
    try:
        with EngineClient(engine.url, SECRET) as client:
            assert client.health()
            assert client.models() == []
            assert client.chat(messages=[])["choices"] == []
        assert len(engine.seen) == 3
        assert elsewhere.seen == []
    finally:
        engine.close()


def test_an_answer_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contract, "_MOST_BYTES", 1 << 20)
    for status in (200, 500):
        engine = Server(status, b'{"data": [' + b" " * (2 << 20) + b"]}")
        try:
            with EngineClient(engine.url) as client, pytest.raises(EngineError):
                client.models()
        finally:
            engine.close()
