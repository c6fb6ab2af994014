"""Whose call it is, by what the caller says in headers."""

from __future__ import annotations

import pytest

from tests.proxy.provider import Provider, Reply
from tests.support.proxies import Proxy

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_calls_with_one_id_are_one_run(proxy: Proxy, provider: Provider):
    about = {
        "x-art-trajectory-id": "run-1",
        "x-art-scenario": "refund-42",
        "X-Art-Session-Id": "s1",
        "x-art-user-id": "zoë",
        "x-art-group": "g1",
    }
    sent = {name: value.encode().decode("latin-1") for name, value in about.items()}
    for stream in (False, True):
        assert proxy.chat(sent, stream=stream)[1]["x-art-trajectory-id"] == "run-1"
    assert {call.trajectory_id for call in proxy.calls(2)} == {"run-1"}
    run = proxy.run("run-1")
    assert (run.origin, run.scenario_key, run.session_id, run.user_id, run.group_key, run.error) == (
        "explicit", "refund-42", "s1", "zoë", "g1", None,
    )  # fmt: skip
    assert not [name for got in provider.got for name in got.names if name.startswith("x-art-")]


def test_a_run_that_has_no_id_gets_one(proxy: Proxy):
    told = proxy.chat({"x-art-scenario": "refund-42"})[1]["x-art-trajectory-id"]
    (call,) = proxy.calls(1)
    assert call.trajectory_id == told


@pytest.mark.parametrize("more", [{}, {"x-art-user-id": "u1"}])
def test_a_trace_is_a_run(more: dict[str, str], proxy: Proxy, provider: Provider):
    answered = proxy.chat({"traceparent": TRACEPARENT} | more)[1]
    assert answered["x-art-trajectory-id"] == TRACE
    (call,) = proxy.calls(1)
    assert call.trajectory_id == TRACE
    assert provider.got[0].header("traceparent") == TRACEPARENT  # it is the caller's, so it goes on


@pytest.mark.parametrize("traceparent", ["nonsense", "", "00-0-0-00"])
def test_a_broken_trace_is_none(traceparent: str, proxy: Proxy):
    assert "x-art-trajectory-id" not in proxy.chat({"traceparent": traceparent})[1]
    proxy.calls(1)


def test_one_callers_context_is_not_the_next_ones(proxy: Proxy):
    connection = proxy.connection()
    for headers in ({"x-art-trajectory-id": "run-2"}, {"traceparent": TRACEPARENT}, {}):
        body = b'{"model": "m", "messages": [{"role": "user", "content": "one connection"}]}'
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"} | headers)
        connection.getresponse().read()
    connection.close()
    *_, last = proxy.calls(3)
    assert last.trajectory_id not in ("run-2", TRACE)


def test_errors_tell_whose_they_were(proxy: Proxy, provider: Provider):
    provider.will(Reply(500))
    status, headers, _ = proxy.chat({"x-art-trajectory-id": "run-3"})
    assert (status, headers["x-art-trajectory-id"]) == (500, "run-3")
    (call,) = proxy.calls(1)
    assert (call.trajectory_id, call.status) == ("run-3", "error")
    assert proxy.run("run-3").error is None


@pytest.mark.parametrize("about", [{}, {"x-art-user-id": "u1"}])
@pytest.mark.parametrize(("said", "learn"), [("no", False), ("Yes", True), ("nonsense", False)])
def test_a_caller_says_whether_its_run_may_be_learned_from(
    about: dict[str, str], said: str, learn: bool, proxy: Proxy, provider: Provider
):
    proxy.chat({"X-Art-Patch-Learn": said} | about)
    (call,) = proxy.calls(1)
    assert proxy.run(call.trajectory_id).learn is learn
    assert not [name for got in provider.got for name in got.names if name.startswith("x-art-")]
