"""Attacks on the running servers, over real sockets: none may change, read or break anything."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_patch.store import open_store
from tests.support.apps import FULL
from tests.support.attacked import (
    ASK,
    CHAT,
    PROXY_KEY,
    Attacked,
    Upstream,
    attacked_feedback,
    attacked_proxy,
    attacked_serve,
)
from tests.support.attacks import JSON, ODD, SECRET, Attack, answers, attempt, request
from tests.support.proxies import until

SERVERS = ("serve", "proxy", "feedback")
HEADER_S = 10
"""Within which the servers want a whole header."""


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    found = Upstream()
    yield found
    found.close()


@pytest.fixture(scope="module")
def servers(base: Path, upstream: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Attacked]]:
    from tests.support.tiny import make_tiny_adapter

    adapters = tmp_path_factory.mktemp("adapters")
    for step in (1, 2):
        make_tiny_adapter(adapters, base, "agent", step, seed=step)
    with ExitStack() as stack:
        feedback = stack.enter_context(attacked_feedback(tmp_path_factory.mktemp("feedback")))
        proxy = stack.enter_context(attacked_proxy(tmp_path_factory.mktemp("proxy"), upstream))
        serve = stack.enter_context(attacked_serve(base, adapters, tmp_path_factory.mktemp("serve") / "home"))
        yield {"serve": serve, "proxy": proxy, "feedback": feedback}


@pytest.fixture(scope="module")
def half_open(servers: dict[str, Attacked]) -> Iterator[dict[str, socket.socket]]:
    """A connection to each server with half a header on it, opened before all attacks."""
    sockets = {name: socket.create_connection(("127.0.0.1", servers[name].port)) for name in SERVERS}
    for sock in sockets.values():
        sock.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
    yield sockets
    for sock in sockets.values():
        sock.close()


@pytest.mark.usefixtures("half_open")
@pytest.mark.parametrize("name", SERVERS)
def test_no_attack_succeeds(name: str, servers: dict[str, Attacked]) -> None:
    server = servers[name]
    assert len(server.attacks) >= 150
    tally = attempt(server.port, server.attacks, server.state)
    assert tally.clean, tally
    assert [status for status, _ in answers(server.port, Attack("proper", server.proper))] == [200]
    assert server.process.poll() is None
    assert "Traceback" not in server.errors.read_text()


@pytest.mark.parametrize("name", SERVERS)
def test_half_a_header_is_waited_for_no_longer_than_ten_seconds(name: str, half_open: dict[str, socket.socket]) -> None:
    sock = half_open[name]
    sock.settimeout(6 * HEADER_S)  # a header is never waited for without end
    with suppress(ConnectionResetError):
        assert sock.recv(100) == b""


def test_a_secret_in_an_answer_is_noticed() -> None:
    """The suite itself: a server that answers all and tells all fails each way."""

    def told(_: BaseHTTPRequestHandler) -> bytes:
        _.send_response(200)
        return SECRET.encode()

    upstream = Upstream()
    upstream.answer = told
    port = int(upstream.url.rpartition(":")[2])
    tally = attempt(port, [Attack("get", b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n")], lambda: list(upstream.paths))
    upstream.close()
    assert tally.attacks == 1 and len(tally.succeeded) == 2  # the answer, and the state


def _hostile(kind: str, victim: Upstream) -> Any:
    def answer(handler: BaseHTTPRequestHandler) -> bytes:
        handler.send_response(307 if kind == "redirect" else 200)
        handler.send_header("content-type", "application/json")
        if kind == "redirect":
            handler.send_header("location", f"{victim.url}/v1/chat/completions")
            return b""
        handler.send_header("content-encoding", {"gzip bomb": "gzip", "deflate": "deflate", "unknown": "br"}[kind])
        return gzip.compress(bytes(64 << 20))

    return answer


@pytest.mark.parametrize("kind", ["redirect", "gzip bomb", "deflate", "unknown"])
def test_a_hostile_engine_gets_nothing_and_its_call_goes_upstream(
    kind: str, servers: dict[str, Attacked], upstream: Upstream
) -> None:
    proxy, victim, engine = servers["proxy"], Upstream(), Upstream()
    engine.answer = _hostile(kind, victim)
    store = open_store(f"sqlite:///{proxy.errors.parent}/default/store.db")
    store.ledger.add_base("agent@0", "/models/tiny", "0" * 64, who="test")
    store.ledger.set_engine(f"{engine.url}/v1", who="test")

    def asked() -> bool:
        ((status, body),) = answers(proxy.port, Attack("proper", proxy.proper))
        assert (status, json.loads(body)["model"]) == (200, "m")  # of upstream
        return bool(engine.paths)

    until(asked)
    assert victim.paths == []
    store.ledger.set_engine(None, who="test")
    store.close()
    victim.close()
    engine.close()


def test_a_bomb_from_upstream_is_not_unpacked(servers: dict[str, Attacked], upstream: Upstream) -> None:
    proxy = servers["proxy"]
    upstream.answer = _hostile("gzip bomb", upstream)
    try:
        ((status, _),) = answers(proxy.port, Attack("proper", proxy.proper))
    finally:
        upstream.answer = None
    assert status == 502
    assert [status for status, _ in answers(proxy.port, Attack("proper", proxy.proper))] == [200]


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def _some(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object with any of the fields; each as it should be, or of any kind."""
    return st.fixed_dictionaries({}, optional={name: proper | _VALUES for name, proper in fields.items()})


_TEXT = st.text(max_size=20)
_CALLS = st.lists(_some(id=_TEXT, type=st.just("function"), function=_some(name=_TEXT, arguments=_TEXT)), max_size=2)
_MESSAGES = st.lists(
    _some(
        role=st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        content=_TEXT | st.lists(_some(type=st.just("text"), text=_TEXT), max_size=2),
        tool_calls=_CALLS,
        tool_call_id=_TEXT,
        name=_TEXT,
    ),
    max_size=3,
)
_TOOLS = st.lists(_some(type=st.just("function"), function=_some(name=_TEXT, parameters=_VALUES)), max_size=2)
_CHATS = st.builds(
    lambda proper, odd: {**ASK, **proper, **odd},
    st.fixed_dictionaries({"messages": _MESSAGES}),
    _some(
        tools=_TOOLS,
        n=st.integers(-1, 3),
        temperature=st.floats(0, 2),
        stop=_TEXT | st.lists(_TEXT, max_size=3),
        stream_options=_some(include_usage=st.booleans()),
        chat_template_kwargs=_VALUES,
        logprobs=st.booleans(),
        seed=st.integers(),
        tool_choice=st.sampled_from(["auto", "none"]),
        metadata=_VALUES,
        model=st.just("agent@0"),
    ),
)


@settings(
    max_examples=5_000 if FULL else 60,
    derandomize=not FULL,  # the same bodies each time, so that a change is to blame for what fails
    suppress_health_check=list(HealthCheck),
)
@given(body=_CHATS)
def test_no_body_is_answered_with_500(body: dict[str, Any], servers: dict[str, Attacked]) -> None:
    content = json.dumps(body)
    for name, headers in (("serve", [JSON]), ("proxy", [JSON, ("x-art-key", PROXY_KEY)])):
        ((status, answer),) = answers(servers[name].port, Attack("fuzz", request("POST", CHAT, headers, content)))
        assert status < 500, answer
