"""Spans of agents and tools, in each dialect, become steps; all others stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from art_patch_integrations.opentelemetry_spans import Processor
from opentelemetry.sdk.trace import TracerProvider

from art_patch.context import identify
from art_patch.recording import Exchange, Recorder, set_recorder
from art_patch.settings import Settings
from art_patch.types import Call, Record, Score, SpanInfo, TrajectoryInfo


class Recording:
    """What reaches the store; calls take their identity as the patch does."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.recorder = Recorder(Settings(flush_interval_s=0.005), open_sink=lambda: self)

    def write(self, records: Any) -> None:
        self.records += records

    def call(self) -> None:
        who = identify()
        Exchange(self.recorder, "m", who.trajectory, who.span_id).finish("complete")

    def of(self, kind: type[Any]) -> list[Any]:
        assert self.recorder.flush(10)
        return [record for record in self.records if isinstance(record, kind)]


@pytest.fixture
def seen() -> Iterator[Recording]:
    recording = Recording()
    set_recorder(recording.recorder)
    yield recording
    set_recorder(None)
    assert recording.recorder.stop(10)


@pytest.fixture
def tracer() -> Any:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Processor())  # type: ignore[arg-type]
    return provider.get_tracer("app")


DIALECTS = {
    "opentelemetry": (
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "Guide", "gen_ai.conversation.id": "s"},
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look", "gen_ai.tool.call.arguments": "sky"},
        "gen_ai.tool.call.result",
    ),
    "openinference": (
        {"openinference.span.kind": "AGENT", "agent.name": "Guide", "session.id": "s"},
        {"openinference.span.kind": "TOOL", "tool.name": "look", "input.value": "sky"},
        "output.value",
    ),
    "langfuse": (
        {"langfuse.observation.type": "agent", "gen_ai.agent.name": "Guide", "session.id": "s"},
        {"langfuse.observation.type": "tool", "gen_ai.tool.name": "look", "langfuse.observation.input": "sky"},
        "langfuse.observation.output",
    ),
    "traceloop": (
        {"traceloop.span.kind": "agent", "traceloop.entity.name": "Guide", "session.id": "s"},
        {"traceloop.span.kind": "tool", "traceloop.entity.name": "look", "traceloop.entity.input": "sky"},
        "traceloop.entity.output",
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect(seen, tracer, dialect):
    agent, tool, output = DIALECTS[dialect]
    with tracer.start_as_current_span("an agent", attributes=agent) as root:
        with tracer.start_as_current_span("POST", attributes={"http.request.method": "POST"}):
            seen.call()
        with tracer.start_as_current_span("a tool", attributes=tool) as span:
            span.set_attribute(output, "blue")
    (call,) = seen.of(Call)
    spans = {each.name: each for each in seen.of(SpanInfo)}
    guide, look = spans["Guide"], spans["look"]
    assert (call.trajectory_id, call.span_id) == (f"{root.get_span_context().trace_id:032x}", guide.id)
    assert (guide.kind, guide.parent_id, look.kind, look.parent_id) == ("agent", None, "tool", guide.id)
    assert look.attributes == {"input": "sky", "output": "blue"}
    assert {(each.name, each.session_id) for each in seen.of(TrajectoryInfo)} == {("Guide", "s")}
    assert identify().trajectory is None


def test_spans_that_say_later_what_they_are(seen, tracer):
    with tracer.start_as_current_span("invoke_agent Guide") as root:
        with tracer.start_as_current_span("chat gpt"):
            seen.call()
        with tracer.start_as_current_span("execute_tool look") as tool:
            mcp = {"mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool"}
            with tracer.start_as_current_span("tools/call look", attributes=mcp):
                pass
            tool.add_event("gen_ai.tool.message", {"content": '{"at": "sky"}'})
            tool.add_event("gen_ai.choice", {"message": "blue"})
        root.set_attributes({"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": "s"})
    look, guide = seen.of(SpanInfo)
    assert (guide.name, look.name) == ("Guide", "look")
    assert (guide.kind, look.kind, look.parent_id) == ("agent", "tool", guide.id)
    assert look.attributes == {"input": '{"at": "sky"}', "output": "blue"}
    assert seen.of(TrajectoryInfo)[-1].session_id == "s"


def test_errors(seen, tracer):
    with pytest.raises(ValueError):
        with tracer.start_as_current_span("chain", attributes={"openinference.span.kind": "CHAIN"}):
            seen.call()
            with tracer.start_as_current_span("find", attributes={"openinference.span.kind": "RETRIEVER"}):
                raise ValueError("nothing there")
    assert [(each.name, each.kind, each.error) for each in seen.of(SpanInfo)] == [
        ("find", "retrieval", "ValueError: nothing there"), ("chain", "span", "ValueError: nothing there"),
    ]  # fmt: skip


def test_an_app_without_agents_is_left_alone(seen, tracer):
    with tracer.start_as_current_span("GET") as span:
        seen.call()
    with tracer.start_as_current_span("idle", attributes={"openinference.span.kind": "CHAIN"}):
        pass
    (call,) = seen.of(Call)
    assert call.span_id == f"{span.get_span_context().span_id:016x}"
    assert seen.of(SpanInfo) == [] and seen.of(Score) == []
