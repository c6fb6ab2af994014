"""Calls past the patch that an integration records: the app's settings hold for them, and they are told truly."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from art_patch.context import own_calls
from art_patch.integrating import record_call
from art_patch.patching import status, unpatch, wrap
from art_patch.patching.bypass import WATCHED, detector

ANSWER = '{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]}'


def body(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def recorded(model: str) -> bool:
    with own_calls.passing(own_calls.Passage()):
        call = record_call(body(model))
    if call is not None:
        call.end(ANSWER)
    return call is not None


def test_the_settings_hold(bench):
    assert not recorded("gpt-x")
    bench.patch(mode="off")
    assert not recorded("gpt-x")
    bench.patch(mode="record", match="gpt-*")
    assert not recorded("qwen")
    assert recorded("gpt-x")
    assert [call.requested_model for call in bench.sink.calls] == ["gpt-x"]
    unpatch()
    assert not recorded("gpt-x")


def test_not_where_only_clients_are_wrapped(bench, client, tmp_path):
    wrap(client, mode="record", home=tmp_path)
    assert not recorded("gpt-x")


def told_of(model: str) -> None:
    """What an integration does in the middle of the library's call."""
    call = record_call(body(model))
    assert call is not None
    call.end(ANSWER)


class BaseLLMHTTPHandler:
    """Stands in for LiteLLM's; both functions are watched."""

    def completion(self, model: str) -> None:
        told_of(model)

    async def response_api_handler(self, model: str) -> None:
        await asyncio.sleep(0)
        told_of(model)


@pytest.mark.parametrize(("mode", "told"), [("record", {}), ("route", {"litellm": 1, "litellm.responses": 1})])
def test_only_modes_that_route_tell_of_them(bench, caplog, monkeypatch, mode, told):
    detector.clear()
    monkeypatch.setitem(sys.modules, WATCHED[0].module, SimpleNamespace(BaseLLMHTTPHandler=BaseLLMHTTPHandler))
    bench.patch(mode=mode)
    BaseLLMHTTPHandler().completion("a")
    asyncio.run(BaseLLMHTTPHandler().response_api_handler("b"))
    assert status().bypasses == told
    assert [call.requested_model for call in bench.sink.calls] == ["a", "b"]
    assert ["), recorded, but not routed: " in line for line in caplog.messages] == [True] * len(told)
    detector.clear()
