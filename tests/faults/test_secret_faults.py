"""s10: a key in twelve places, and not one byte of it in the database, its log, its index, or what we log."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from typing import Any

import openai
import pytest

import art_patch as art
from art_patch.patching import control
from art_patch.settings import Settings
from art_patch.types import Route
from tests.support.apps import Store
from tests.support.servers import Answer, StubServer, completion, error


def grep(store: Store, secret: str) -> dict[str, int]:
    """How often the secret is in each file, as it is and inside what is compressed."""
    found = {
        path.name: path.read_bytes().count(secret.encode()) for path in store.path.parent.rglob("*") if path.is_file()
    }
    with store.opened() as opened:
        found["records"] = repr(opened.read.recent(limit=100_000)).count(secret)
    return found


@pytest.mark.parametrize("engine", ["none", "up", "failing"])
def test_s10_secret_canary(
    store: Store, upstream: StubServer, local: StubServer, monkeypatch, caplog, capfd, figure, engine
):
    caplog.set_level(logging.DEBUG, "art_patch")
    canary = f"sk-canary-{secrets.token_hex(12)}"
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, canary)  # 1: environment
    route = Route() if engine == "none" else Route(champion="shop@3", base_url=local.url)
    control.start(
        Settings(store=store.url, redact="secrets", flush_interval_s=0.01, timeout_s=0.5), read_route=lambda *_: route
    )
    if engine == "failing":
        local.always = error(500, f"the engine says {canary}")  # 2: the engine's error
    with_userinfo = upstream.url.replace("://", f"://user:{canary}@")  # 3: userinfo of the address
    client = openai.OpenAI(
        base_url=f"{with_userinfo}?key={canary}",  # 4: query of the address
        api_key=canary,  # 5: key
        organization=canary,  # 6: organisation
        project=canary,  # 7: project
        default_headers={"X-Secret": canary},  # 8: header
        default_query={"q": canary},  # 9: query
        max_retries=0,
    )
    tool = [{"id": "c1", "type": "function", "function": {"name": "pay", "arguments": json.dumps({"key": canary})}}]
    messages: Any = [
        {"role": "user", "content": f"my key is {canary}, keep it"},  # 10: what the user says
        {"role": "assistant", "content": None, "tool_calls": tool},
        {"role": "tool", "tool_call_id": "c1", "content": f"PermissionError: token {canary} is invalid"},  # 11: a tool
    ]
    extras: dict[str, Any] = {
        "extra_headers": {"Authorization": f"Bearer {canary}"},
        "extra_query": {"token": canary},
        "extra_body": {"api_key": canary, "metadata": {"x": canary}},
        "user": canary,
    }
    with client, contextlib.suppress(openai.APIError):
        client.chat.completions.create(model="gpt-x", messages=messages, **extras)
        list(client.chat.completions.create(model="gpt-x", messages=messages, stream=True, **extras))
        upstream.will(Answer(body=json.dumps(completion({"model": "m"}, content=f"it is {canary}")).encode()))
        client.chat.completions.create(model="gpt-x", messages=messages, **extras)
    # A base address with a query reaches no path; the same once more with one that does, and an error that tells all.
    plain = openai.OpenAI(base_url=upstream.url, api_key=canary, max_retries=0)
    with plain:
        plain.chat.completions.create(model="gpt-x", messages=messages, **extras)
        list(plain.chat.completions.create(model="gpt-x", messages=messages, stream=True, **extras))
        local.always = error(500, f"key={canary}")
        upstream.script.clear()
        upstream.will(error(401, f"wrong key {canary} at https://me:{canary}@host/?api_key={canary}"))  # 12: exception
        with pytest.raises(openai.AuthenticationError, match=canary):
            plain.chat.completions.create(model="gpt-x", messages=messages, **extras)
        with pytest.raises(RuntimeError), art.trajectory(name=canary, metadata={"key": canary}):
            plain.chat.completions.create(model="gpt-x", messages=messages, **extras)
            raise RuntimeError(f"failed with {canary}")
    assert art.flush(30)
    found = grep(store, canary)
    out, err = capfd.readouterr()
    found["log"] = (caplog.text + out + err).count(canary)
    assert {"store.db", "store.db-wal", "store.db-shm"} <= found.keys()
    assert store.count() >= 4
    figure(f"s10 secret_bytes_found, engine {engine}", sum(found.values()) * len(canary), "0")
    assert sum(found.values()) == 0, found
    art.unpatch()


def test_a_secret_that_a_stream_cuts_in_two_is_hidden(store: Store, upstream: StubServer):
    control.start(Settings(store=store.url, redact="secrets", flush_interval_s=0.01), read_route=lambda *_: Route())
    begun, arguments = {"index": 0, "id": "t1", "type": "function"}, ('{"api_key": "hunte', 'r-22-abc"}')
    deltas: list[dict[str, Any]] = [{"content": piece} for piece in ("the key is s", "k-ab", "cdef", "ghij99", ". Bye")]
    deltas.append({"tool_calls": [begun | {"function": {"name": "f", "arguments": ""}}]})
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in arguments]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-x"}
    events = [b"data: " + json.dumps(frame | {"choices": [choice]}).encode() + b"\n\n" for choice in choices]
    upstream.will(Answer(events=[*events, b"data: [DONE]\n\n"]))
    messages: Any = [{"role": "user", "content": "?"}]
    with openai.OpenAI(base_url=upstream.url, api_key="x", max_retries=0) as client:
        said = list(client.chat.completions.create(model="gpt-x", messages=messages, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said).startswith("the key is sk-abcdefghij99")
    assert art.flush(30)
    with store.opened() as opened:
        (trajectory,) = opened.read.recent(limit=1)
    assert "the key is ***. Bye" in repr(trajectory) and "***" in repr(
        trajectory.calls[0].choices[0].message["tool_calls"]
    )
    found = {secret: sum(grep(store, secret).values()) for secret in ("ghij99", "hunter-22", "22-abc")}
    assert set(found.values()) == {0}, found
    art.unpatch()


@pytest.mark.parametrize("secret", ["org-AbCdEfGh12345678", "proj_AbCd1234EfGh", "ab12-x9", "swordfish"])
def test_what_a_provider_echoes_is_hidden_without_being_asked_for(store: Store, upstream: StubServer, secret: str):
    control.start(Settings(store=store.url, flush_interval_s=0.01), read_route=lambda *_: Route())
    words = {
        "org-AbCdEfGh12345678": f"Request too large for gpt-x in organization {secret} on tokens per min",
        "proj_AbCd1234EfGh": f"Project `{secret}` does not have access to model `gpt-x`",
        "ab12-x9": f"Incorrect API key provided: {secret}. See https://host/cb?n=1&code={secret} and ?key={secret}",
        "swordfish": f"the password is {secret}",
    }[secret]
    upstream.will(error(401, words))
    with openai.OpenAI(base_url=upstream.url, api_key="x", max_retries=0) as client, pytest.raises(openai.APIError):
        client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "?"}])
    assert art.flush(30)
    assert store.count() == 1
    assert sum(grep(store, secret).values()) == 0
    art.unpatch()
