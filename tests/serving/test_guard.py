"""Who may call a server on loopback: programs of this machine, no web page, and with a key whoever changes it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import EngineError
from art_patch.serving import EmbeddedEngine, EngineClient
from tests.support.engines import ADMIN_KEY, Running, serve

CHAT = "/v1/chat/completions"
ASK = json.dumps({"model": "agent@1", "messages": [{"role": "user", "content": "plum"}], "max_tokens": 1})
UNLOAD = json.dumps({"lora_name": "agent@1"})
JSON = {"content-type": "application/json"}
WAYS = (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/health"))


@pytest.fixture(scope="module")
def guarded(base_dir: Path, adapters: Path) -> Iterator[Running]:
    with serve(EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters), names=["gpu1.internal"]) as server:
        server.client.load("agent@1")
        yield server


def send(server: Running, method: str, path: str, body: str | None, headers: dict[str, str]) -> tuple[int, Any]:
    """One request as plain bytes, with no header but these."""
    connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    content = (body or "").encode()
    for name, value in ({"host": server.url.split("/")[2], "content-length": str(len(content))} | headers).items():
        connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()


def refusal(answer: tuple[int, Any]) -> tuple[int, str]:
    status, body = answer
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


def test_a_web_page_cannot_unload_the_champion(guarded: Running) -> None:
    blind = {"origin": "https://evil.example", "content-type": "text/plain"}
    assert refusal(send(guarded, "POST", "/v1/unload_lora_adapter", UNLOAD, blind))[0] == 403
    assert send(guarded, "POST", CHAT, ASK, JSON)[0] == 200


def test_no_page_is_answered(guarded: Running) -> None:
    here = guarded.url.split("/")[2]
    port = here.rpartition(":")[2]
    strangers = ["https://evil.example", "null", "http://localhost:3000", f"http://localhost:{port}"]
    for origin in (*strangers, "http://127.0.0.1", f"http://user@{here}", "", here):
        for method, path in WAYS:
            status, message = refusal(send(guarded, method, path, ASK, {"origin": origin, **JSON}))
            assert (status, "web page" in message) == (403, True)
    assert send(guarded, "GET", "/v1/models", None, {"origin": guarded.url})[0] == 200


def test_a_page_that_sends_no_origin_is_not_answered_either(guarded: Running) -> None:
    for site in ("cross-site", "same-site"):  # of what an image asks for, say
        for method, path in WAYS:
            status, message = refusal(send(guarded, method, path, ASK, {"sec-fetch-site": site, **JSON}))
            assert (status, "web page" in message) == (403, True)
    assert send(guarded, "GET", "/v1/models", None, {"sec-fetch-site": "none"})[0] == 200


def test_another_name_for_loopback_is_refused(guarded: Running) -> None:
    names = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "0.0.0.0:8700", "10.0.0.1", "[::2]", "["]
    for host in (*names, "", "a@127.0.0.1", "localhost@evil", "127.0.0.1 evil", "localhost:80:80"):
        for method, path in WAYS:
            status, message = refusal(send(guarded, method, path, ASK, {"host": host, **JSON}))
            assert (status, "127.0.0.1 and localhost" in message) == (403, True)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.1.1:80", "[::1]:87", "gpu1.internal"])
def test_loopbacks_own_names_and_the_advertised_one_are_fine(host: str, guarded: Running) -> None:
    assert send(guarded, "GET", "/v1/models", None, {"host": host})[0] == 200


def test_json_must_say_that_it_is(guarded: Running) -> None:
    ours = {"authorization": f"Bearer {ADMIN_KEY}"}
    for path in (CHAT, f"/exact{CHAT}", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        body = ASK if path.endswith(CHAT) else UNLOAD
        kinds = ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", "")
        for kind in ({}, *({"content-type": kind} for kind in kinds)):
            status, message = refusal(send(guarded, "POST", path, body, ours | kind))
            assert (status, "content-type: application/json" in message) == (415, True)
    assert "agent@1" in guarded.client.models()
    assert send(guarded, "POST", CHAT, ASK, {"content-type": "Application/JSON; charset=utf-8"})[0] == 200


@pytest.mark.parametrize("key", [None, "wrong", "none", ADMIN_KEY[:-1]])
def test_what_changes_the_server_wants_its_key(key: str | None, guarded: Running) -> None:
    authorization = {} if key is None else {"authorization": f"Bearer {key}"}
    for change in ("load", "unload"):
        status, message = refusal(send(guarded, "POST", f"/v1/{change}_lora_adapter", UNLOAD, JSON | authorization))
        assert (status, "admin.key" in message) == (401, True)
    with EngineClient(guarded.url, admin_key=key) as stranger:
        assert stranger.chat(**json.loads(ASK))["model"] == "agent@1", "what serves needs no key"
        with pytest.raises(EngineError, match=r"answered 401: .*admin\.key"):
            stranger.unload("agent@1")
    assert "agent@1" in guarded.client.models()


def test_the_key_opens_it(guarded: Running) -> None:
    guarded.client.load("agent@2")
    assert "agent@2" in guarded.client.models()
    guarded.client.unload("agent@2")
    assert "agent@2" not in guarded.client.models()


def test_without_any_key_nothing_can_be_changed(base_dir: Path, adapters: Path) -> None:
    with serve(EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters), admin_key=None) as server:
        for key in (None, ADMIN_KEY):
            with EngineClient(server.url, admin_key=key) as client, pytest.raises(EngineError, match="answered 401"):
                client.load("agent@1")


def test_a_callers_key_guards_changes_as_all_else(base_dir: Path, adapters: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(base_dir, adapters_root=adapters)
    with serve(engine, api_key="s3cret-key") as server:
        server.client.load("agent@1")
        with (
            EngineClient(server.url, admin_key=ADMIN_KEY) as stranger,
            pytest.raises(EngineError, match="answered 401"),
        ):
            stranger.unload("agent@1")
        assert server.client.models() == ["agent@0", "agent@1"]
