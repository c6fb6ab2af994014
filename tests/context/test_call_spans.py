"""Other instrumentations' spans around one call are no trajectory, and our own span would only repeat them."""

from __future__ import annotations

from typing import Any

import pytest

from art_patch.context import identify, span, trajectory

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")

CALLS: list[dict[str, Any]] = [
    {"gen_ai.operation.name": "chat"},
    {"openinference.span.kind": "LLM"},
    {"langfuse.observation.type": "generation"},
    {"llm.request.type": "chat"},
]
RUNS: list[dict[str, Any]] = [
    {},
    {"gen_ai.operation.name": "invoke_agent"},
    {"openinference.span.kind": "AGENT"},
    {"langfuse.observation.type": "span"},
]


@pytest.fixture
def tracer():
    return sdk.TracerProvider().get_tracer("other")


@pytest.mark.parametrize("attributes", CALLS)
def test_a_call_span_alone_leaves_the_call_to_stitching(tracer, attributes):
    with tracer.start_as_current_span("ChatCompletion", attributes=attributes):
        found = identify()
    assert (found.trajectory, found.span_id, found.otel_context) == (None, None, None)


@pytest.mark.parametrize("attributes", CALLS)
def test_what_surrounds_a_call_span_counts(tracer, attributes):
    with tracer.start_as_current_span("agent") as agent:
        with tracer.start_as_current_span("ChatCompletion", attributes=attributes):
            found = identify()
    context = agent.get_span_context()
    assert found.trajectory is not None
    assert (found.trajectory.id, found.span_id) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert found.otel_context is None


@pytest.mark.parametrize("attributes", RUNS)
def test_every_other_span_is_a_run(tracer, attributes):
    with tracer.start_as_current_span("run", attributes=attributes) as run:
        found = identify()
    assert found.trajectory is not None
    assert found.trajectory.id == f"{run.get_span_context().trace_id:032x}"
    assert found.otel_context is not None


def test_our_own_blocks_win(tracer):
    with trajectory() as mine, span("part") as part, tracer.start_as_current_span("x", attributes=CALLS[0]):
        found = identify()
    assert (found.trajectory, found.span_id, found.otel_context) == (mine, part, None)
