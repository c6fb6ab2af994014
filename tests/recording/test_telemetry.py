"""Spans for the app's own OpenTelemetry: what is on them, whose children they are, and when there are none."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai
import pytest
from opentelemetry import context as otel
from opentelemetry import trace

from art_patch._lib.faults import faults
from art_patch.context import group, span, suppress, trajectory
from art_patch.patching import control, flush, unpatch
from art_patch.recording import telemetry
from art_patch.settings import Settings
from art_patch.types import Call, Record, Route, SpanInfo
from tests.support.patched_sdk import CHAMPION
from tests.support.sdk_samples import ASK, MESSAGES, TOOLS
from tests.support.servers import PROMPT_IDS, TEXT, TOOL_CALL, Answer, chunks, error, no_certificates, serving

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

CANARY = "the answer is forty-two"


class App:
    """A patched app with a tracer provider. `spans` waits for what is queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, upstream: Any, local: Any) -> None:
        self.upstream = upstream
        self.local = local
        self.records: list[Record] = []
        self.provider = TracerProvider()
        self.exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("app")
        self.client = openai.OpenAI(api_key="sk-x", base_url=upstream.url, max_retries=0)
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: self.provider)
        monkeypatch.delenv(telemetry.CAPTURE, raising=False)

    def patch(self, **changes: Any) -> None:
        settings = Settings(**{"flush_interval_s": 0.005, "mode": "record"} | changes)
        route = Route(champion=CHAMPION, base_url=self.local.url)
        control.start(settings, open_sink=lambda: self, read_route=lambda *_: route)

    def write(self, records: Sequence[Record]) -> None:
        self.records += records

    def ask(self, **changes: Any) -> Any:
        return self.client.chat.completions.create(**ASK | changes)

    @property
    def spans(self) -> list[Any]:
        assert flush(10)
        return list(self.exporter.get_finished_spans())

    @property
    def span(self) -> Any:
        (found,) = self.spans
        return found

    def of(self, kind: type[Any]) -> list[Any]:
        assert flush(10)
        return [record for record in self.records if isinstance(record, kind)]


@pytest.fixture
def app(monkeypatch, tmp_path) -> Iterator[App]:
    faults.clear()
    with no_certificates(tmp_path), serving() as upstream, serving() as local:
        app = App(monkeypatch, upstream, local)
        yield app
        unpatch()
        app.client.close()
    assert faults.counts == {}


def parent(span: Any) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_everything_that_is_known(app):
    app.patch()
    with trajectory("shop", scenario="refund", session_id="s1"), group("g"), span("part"):
        app.ask(temperature=0, top_p=0.5, max_tokens=7, seed=0, n=2, stop="x", logprobs=True, user="u")
    call, part = app.of(Call)[0], app.of(SpanInfo)[0]
    root, chat = sorted(app.spans, key=lambda span: span.name, reverse=True)
    assert chat.name == "chat gpt-x"
    assert chat.kind is trace.SpanKind.CLIENT
    assert chat.status.status_code is trace.StatusCode.UNSET
    assert (chat.start_time, chat.end_time) == (
        int(call.started_at * 1e9),
        int((call.started_at + call.duration_ms / 1000) * 1e9),
    )
    assert dict(chat.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.seed": 0,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.response.model": "gpt-x",
        "gen_ai.response.id": "c",
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": len(PROMPT_IDS),
        "gen_ai.usage.output_tokens": 2 * len(TEXT),
        "gen_ai.conversation.id": "s1",
        "server.address": "127.0.0.1",
        "server.port": int(app.upstream.url.split(":")[2].split("/")[0]),
        "art.trajectory.id": call.trajectory_id,
        "art.scenario.id": "refund",
        "art.span.id": part.id,
        "art.call.id": call.id,
        "art.served_by": "upstream",
    }
    assert root.name == "invoke_agent shop"
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "shop",
        "gen_ai.conversation.id": "s1",
        "art.trajectory.id": call.trajectory_id,
        "art.scenario.id": "refund",
    }


def test_a_streamed_answer_of_the_champion(app):
    app.patch(mode="route")
    for _ in app.ask(stream=True):
        pass
    found, call = app.span.attributes, app.of(Call)[0]
    assert found["gen_ai.provider.name"] == "vllm"
    assert found["gen_ai.request.model"] == "gpt-x"
    assert found["gen_ai.response.model"] == found["art.served_by"] == CHAMPION
    assert found["gen_ai.request.stream"] is True
    assert found["gen_ai.response.time_to_first_chunk"] == call.ttft_ms / 1000
    assert found["gen_ai.response.id"] == "c"
    assert found["server.port"] == int(app.local.url.split(":")[2].split("/")[0])


def test_a_fallback_is_one_span(app):
    app.patch(mode="route")
    app.local.always = error(500)
    app.ask()
    found = app.span.attributes
    assert found["art.fallback"] == "the engine answered HTTP 500: no"
    assert (found["art.served_by"], found["gen_ai.response.model"]) == ("upstream", "gpt-x")
    assert found["server.port"] == int(app.upstream.url.split(":")[2].split("/")[0])


def test_an_error(app):
    app.patch()
    app.upstream.will(error(429, "slow down"))
    with pytest.raises(openai.RateLimitError), trajectory("shop"):
        app.ask()
    chat, root = app.spans
    for found in (chat, root):
        assert found.attributes["error.type"] == "RateLimitError"
        assert found.status.status_code is trace.StatusCode.ERROR
        assert "slow down" in found.status.description
    assert "gen_ai.response.id" not in chat.attributes


def test_a_stream_that_is_given_up(app):
    app.patch()
    gate = threading.Event()
    app.upstream.will(Answer(events=chunks(ASK), gate=gate))
    with app.ask(stream=True) as stream:
        next(iter(stream))
    gate.set()
    assert app.span.attributes["art.status"] == "abandoned"
    assert app.span.status.status_code is trace.StatusCode.UNSET


def test_it_is_the_child_of_the_span_that_was_active(app):
    app.patch()
    with app.tracer.start_as_current_span("request") as request:
        stream = app.ask(stream=True)
    with app.tracer.start_as_current_span("other"):
        for _ in stream:
            pass
    chat = next(found for found in app.spans if found.name == "chat gpt-x")
    assert parent(chat) == request.get_span_context().span_id
    assert chat.context.trace_id == request.get_span_context().trace_id
    assert chat.attributes["art.trajectory.id"] == f"{chat.context.trace_id:032x}"


def test_a_trajectory_inside_a_trace_makes_no_parent_of_its_own(app):
    app.patch()
    with app.tracer.start_as_current_span("request") as request, trajectory("shop"):
        app.ask()
        with app.tracer.start_as_current_span("step") as step:
            app.ask()
    found = {each.name: each for each in app.spans if each.name != "chat gpt-x"}
    assert found.keys() == {"request", "step"}
    chats = [each for each in app.spans if each.name == "chat gpt-x"]
    assert [parent(each) for each in chats] == [each.get_span_context().span_id for each in (request, step)]


def test_the_calls_of_a_trajectory_are_one_trace(app):
    app.patch()
    with trajectory("one") as one:
        threads = [threading.Thread(target=app.ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        late = app.ask(stream=True)
    with trajectory() as two:
        app.ask()
    app.ask()
    assert flush(10)
    for _ in late:
        pass
    roots = {each.attributes["art.trajectory.id"]: each for each in app.spans if each.name.startswith("invoke_agent")}
    assert {each.name for each in roots.values()} == {"invoke_agent one", "invoke_agent"}
    children = [each for each in app.spans if each.name == "chat gpt-x"]
    assert len(children) == 5
    for child in children:
        root = roots.get(child.attributes["art.trajectory.id"])
        assert parent(child) == (None if root is None else root.context.span_id)
        assert root is None or root.start_time <= child.start_time
    assert {one.id, two.id} == roots.keys()
    assert len({each.context.trace_id for each in app.spans}) == 3


def test_a_trajectory_that_never_ends_is_ended_with_the_patch(app):
    app.patch()
    scope = trajectory("open")
    scope.__enter__()
    app.ask()
    assert [each.name for each in app.spans] == ["chat gpt-x"]
    unpatch()
    chat, root = app.spans
    assert (root.name, root.end_time) == ("invoke_agent open", chat.end_time)
    scope.__exit__(None, None, None)


def test_a_stream_that_begins_after_its_trajectory_was_forgotten(app, monkeypatch):
    monkeypatch.setattr(telemetry, "MAX_RUNS", 1)
    app.patch()
    with trajectory("first"):
        app.ask()
        with trajectory("second"):
            app.ask()
        app.ask()
    assert sorted(each.name for each in app.spans) == [
        *["chat gpt-x"] * 3,
        "invoke_agent first",
        "invoke_agent second",
    ]


def test_texts_stay_out(app):
    app.patch()
    with trajectory():
        app.ask(messages=[{"role": "user", "content": CANARY}], tools=TOOLS)
    assert "forty-two" not in str([dict(each.attributes) for each in app.spans])


@pytest.mark.parametrize("wish", ["event_only", "no_content", "false"])
def test_texts_that_are_not_wanted_on_spans_stay_out(app, wish, monkeypatch):
    monkeypatch.setenv(telemetry.CAPTURE, wish)
    app.patch()
    app.ask(messages=[{"role": "user", "content": CANARY}])
    assert "forty-two" not in str(dict(app.span.attributes))


@pytest.mark.parametrize("wish", ["span_only", "SPAN_AND_EVENT", "true"])
def test_texts_on_request(app, wish, monkeypatch):
    monkeypatch.setenv(telemetry.CAPTURE, wish)
    app.patch(redact=lambda text: text.replace("Bob", "***"))
    messages = [
        {"role": "system", "content": "Be kind to Bob."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
    ]
    app.ask(messages=messages, tools=TOOLS)
    found = {name: json.loads(app.span.attributes[f"gen_ai.{name}"]) for name in ("input.messages", "output.messages")}
    call = {"type": "tool_call", "id": "call_1", "name": "look", "arguments": {"at": "sky"}}
    assert found["input.messages"] == [
        {"role": "system", "parts": [{"type": "text", "content": "Be kind to ***."}]},
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "look"},
                {"type": "uri", "modality": "image", "uri": "https://x/y.png"},
                {"type": "image_url"},
            ],
        },
        {"role": "assistant", "parts": [call]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "blue"}]},
    ]
    assert found["output.messages"] == [{"role": "assistant", "parts": [call], "finish_reason": "tool_calls"}]
    assert json.loads(app.span.attributes["gen_ai.tool.definitions"])[0]["function"]["name"] == "look"


def test_suppressed_by_opentelemetry(app):
    app.patch()
    token = otel.attach(otel.set_value(otel._SUPPRESS_INSTRUMENTATION_KEY, True))
    try:
        app.ask()
    finally:
        otel.detach(token)
    assert app.spans == []
    assert len(app.of(Call)) == 1


@pytest.mark.parametrize("why", ["off", "suppress", "sample_rate"])
def test_what_is_not_wanted_has_no_span(app, why):
    app.patch(**{"off": {"otel": "off"}, "suppress": {}, "sample_rate": {"sample_rate": 0.0}}[why])
    if why == "suppress":
        with suppress():
            app.ask()
    else:
        with trajectory():
            app.ask()
    assert app.spans == []
    assert len(app.of(Call)) == (why == "off")


@pytest.mark.parametrize("provider", [trace.ProxyTracerProvider(), trace.NoOpTracerProvider()])
def test_without_a_provider_there_is_nothing(app, provider):
    real, app.provider = app.provider, provider
    app.patch()
    with trajectory():
        app.ask()
        assert flush(10)
        app.provider = real  # from now on
        app.ask()
    assert sorted(each.name for each in app.spans) == ["chat gpt-x", "invoke_agent"]


def test_the_apps_sampler_decides(app):
    app.provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    app.provider.add_span_processor(SimpleSpanProcessor(app.exporter))
    app.patch()
    with trajectory():
        app.ask()
    assert app.spans == []


def test_a_broken_processor_costs_the_span_only(app):
    class Broken(SpanProcessor):
        def on_end(self, span: Any) -> None:
            raise ZeroDivisionError

    app.provider.add_span_processor(Broken())
    app.patch()
    with trajectory():
        app.ask()
    assert len(app.of(Call)) == 1
    assert faults.counts.keys() == {"telemetry"}
    faults.clear()


def test_azure_and_others_are_named():
    hosts: Mapping[str, str] = {
        "me.openai.azure.com": "azure.ai.openai",
        "api.openai.com": "openai",
        "api.groq.com": "groq",
        "10.0.0.7": "openai",
    }
    assert {host: telemetry._provider(host) for host in hosts} == hosts


SCRIPT = """
import sys, logging
logging.basicConfig(level=logging.WARNING)
import art_patch
art_patch.patch(mode="record", home=sys.argv[1])
import openai
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.name + chr(10))))
trace.set_tracer_provider(provider)
client = openai.OpenAI(api_key="k", base_url=sys.argv[2])
with art_patch.trajectory("run"):
    client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": "hi"}])
if sys.argv[3] == "shut down":
    provider.shutdown()
"""


@pytest.mark.parametrize("end", ["exit", "shut down"])
def test_at_exit_the_last_spans_are_made_before_the_provider_ends(tmp_path, end):
    with serving() as upstream:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), upstream.url, end], capture_output=True, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")
    if end == "exit":
        assert sorted(done.stdout.split("\n")) == ["", "chat gpt-x", "invoke_agent run"]


def test_times_are_those_of_the_call_not_of_the_writer(app):
    app.patch(flush_interval_s=0.2)
    before = time.time() - 0.001  # two clocks
    app.ask(messages=MESSAGES)
    after = time.time() + 0.001
    assert before <= app.span.start_time / 1e9 <= app.span.end_time / 1e9 <= after
