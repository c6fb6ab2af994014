"""Who may call, where it listens, and how it starts and stops."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proxy.provider import Provider, Reply
from tests.support.command_line import warned
from tests.support.proxies import ENVIRONMENT, Proxy, until

ASK = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'


def refused(*options: str, code: int, home: Path, before: str = "", **environment: str) -> str:
    """Start a proxy that must not start; return its one line on stderr."""
    script = f"{before}\nfrom art_patch.cli import main; main()"
    command = [sys.executable, "-c", script, "proxy", "--port", "0", "--home", str(home), *options]
    result = subprocess.run(command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("art-patch: ")
    return line


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "10.0.0.1", "[", "localhost@evil"],
)
def test_another_name_for_loopback_is_refused(host: str, proxy: Proxy, provider: Provider):
    assert proxy.ask("POST", "/v1/chat/completions", ASK, {"host": host})[0] in (400, 403)
    assert proxy.ask("GET", "/health", headers={"host": host})[0] in (400, 403)
    assert provider.got == []


@pytest.mark.parametrize("host", ["localhost", "localhost:1234", "127.0.0.1:8701", "[::1]:8701", "LOCALHOST"])
def test_loopbacks_own_names_are_fine(host: str, proxy: Proxy):
    assert proxy.ask("GET", "/health", headers={"host": host})[0] == 200


def test_web_pages_are_refused(proxy: Proxy, provider: Provider):
    pages = ("https://evil.example", "null", "http://localhost:3000", f"http://user@127.0.0.1:{proxy.port}")
    for origin in pages:
        status, headers, _ = proxy.ask("POST", "/v1/chat/completions", ASK, {"origin": origin})
        assert status == 403
        assert "access-control-allow-origin" not in headers
    assert provider.got == []
    assert proxy.ask("POST", "/v1/embeddings", b"{}", {"origin": f"http://127.0.0.1:{proxy.port}"})[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_what_a_page_may_send_without_asking_first_is_no_json(path: str, proxy: Proxy, provider: Provider):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, _, body = proxy.ask("POST", path, ASK, {"content-type": kind})
        assert (status, "content-type: application/json" in json.loads(body)["error"]["message"]) == (415, True)
    assert provider.got == []
    assert proxy.ask("POST", "/v1/files", ASK, {"content-type": "text/plain"})[0] == 200


def test_a_key_is_asked_for(tmp_path: Path, provider: Provider):
    key = tmp_path / "key"
    key.write_text("opensesame\n")
    key.chmod(0o600)
    proxy = Proxy(tmp_path, provider.url, "--key-file", str(key), "--host", "0.0.0.0")
    try:
        for given in ({}, {"x-art-key": "wrong"}, {"authorization": "Bearer opensesame"}):
            status, _, body = proxy.ask("POST", "/v1/chat/completions", ASK, given)
            assert (status, "x-art-key" in json.loads(body)["error"]["message"]) == (401, True)
        assert provider.got == []
        asked = {"x-art-key": "opensesame", "host": "proxy.internal"}
        assert proxy.ask("POST", "/v1/chat/completions", ASK, asked)[0] == 200
        assert "x-art-key" not in provider.got[0].names
        assert proxy.ask("GET", "/health")[0] == 200
    finally:
        assert proxy.stop() == 0
    assert warned(proxy.errors.read_text()) == ""


def test_running_calls_are_finished_and_written(tmp_path: Path, provider: Provider):
    proxy = Proxy(tmp_path, provider.url)
    provider.will(Reply(body=[b'{"choices":', b" []}"], gate=provider.left))
    connection = proxy.connection()
    connection.request("POST", "/v1/chat/completions", ASK, {"content-type": "application/json"})
    until(lambda: provider.got)
    proxy.process.send_signal(signal.SIGINT)
    until(lambda: not listens(proxy.port))
    provider.left.set()
    assert connection.getresponse().read() == b'{"choices": []}'
    connection.close()
    assert proxy.process.wait(60) == 130
    assert proxy.process.stdout is not None
    proxy.process.stdout.close()
    proxy.calls(1)
    assert warned(proxy.errors.read_text()).startswith("art-patch: interrupted")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_provider_that_is_not_there_is_a_bad_gateway(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    proxy = Proxy(tmp_path, f"http://127.0.0.1:{port}/v1")
    try:
        for path in ("/v1/chat/completions", "/v1/models"):
            status, _, body = proxy.ask("POST", path, ASK)
            assert (status, "upstream" in json.loads(body)["error"]["message"]) == (502, True)
        (call,) = proxy.calls(1)
        assert call.status == "error"
    finally:
        assert proxy.stop() == 0


def test_what_cannot_be_is_said(tmp_path: Path):
    assert "key file" in refused("--host", "0.0.0.0", code=2, home=tmp_path)
    assert "https://api.openai.com/v1" in refused("--upstream", "api.openai.com", code=2, home=tmp_path)
    assert "password" in refused("--upstream", "https://u:p@api.openai.com/v1", code=2, home=tmp_path)
    assert "ART_PATCH_MODE" in refused("--mode", "sideways", code=2, home=tmp_path)
    assert "OPENAI_BASE_URL" in refused(
        "--port", "18701", code=2, home=tmp_path, OPENAI_BASE_URL="http://localhost:18701/v1"
    )
    missing = "import sys; sys.modules['uvicorn'] = None"
    assert 'pip install "art-patch[proxy]"' in refused(code=2, home=tmp_path, before=missing)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused("--port", port, code=10, home=tmp_path)
