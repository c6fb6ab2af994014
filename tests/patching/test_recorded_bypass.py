"""Calls past the patch that an integration records: the app's settings hold for them, and they are told truly."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest

from art_patch.context import ambient
from art_patch.context.integration import record_call
from art_patch.patching import status, unpatch, wrap
from art_patch.patching.sdk.bypass import WATCHED, detector

ANSWER = '{"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]}'


def body(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def recorded(model: str) -> bool:
    with ambient.passing(ambient.Passage()):
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


class Logging:
    """Stands in for LiteLLM's: the function that sends a request tells it before."""

    def __init__(self, call_type: str = "completion") -> None:
        self.call_type = call_type
        self.heard: list[bool] = []

    def pre_call(self) -> None:
        call = record_call(body("c"))
        self.heard.append(call is not None)
        if call is not None:
            call.end(ANSWER)


def sends(module: str, logging: Logging) -> list[bool]:
    """A function of that module sends a request; whether it was recorded."""
    there = {"__name__": module}
    exec("def send(logging): logging.pre_call()", there)
    there["send"](logging)
    return logging.heard


@pytest.mark.parametrize("mode", ["record", "route"])
def test_requests_that_litellm_sends_past_the_sdk_by_any_client(bench, monkeypatch, mode):
    detector.clear()
    module = "litellm.litellm_core_utils.litellm_logging"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(Logging=Logging))
    bench.patch(mode=mode)
    for past in ("anthropic.chat.handler", "vertex_ai.gemini.any", "openai_like.chat.handler", "azure_ai.new"):
        logging = Logging("acompletion")
        assert sends(f"litellm.llms.{past}", logging) == [True]
        assert sends(f"litellm.llms.{past}", logging) == [True, False]  # tells of the same request again
    for seen in ("litellm.llms.openai.openai", "litellm.llms.azure.azure", "litellm.main"):
        assert sends(seen, Logging()) == [False]
    assert sends("litellm.llms.cohere.embed.handler", Logging("embedding")) == [False]
    with ambient.passing(ambient.Passage()):  # counted by the function around it
        assert sends("litellm.llms.custom_httpx.llm_http_handler", Logging()) == [True]
    assert status().bypasses == ({} if mode == "record" else {"litellm": 4})
    assert len(bench.sink.calls) == 5
    detector.clear()


def test_a_call_that_a_task_makes_after_the_one_in_which_it_began_is_another(bench):
    bench.patch(mode="record")

    async def later(sent: asyncio.Event) -> bool:
        await sent.wait()
        return record_call(body("late")) is not None

    async def run() -> bool:
        sent = asyncio.Event()
        with ambient.passing(ambient.Passage()):
            task = asyncio.create_task(later(sent))
        sent.set()
        return await task

    assert not asyncio.run(run())


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
