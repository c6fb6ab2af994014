"""OpenTelemetry spans that an integration has told of: calls inside are the step's, wherever the span is active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace

from art_patch.context import ambient, span, trajectory
from art_patch.context.integration import Run
from art_patch.types import Call, SpanInfo, TrajectoryInfo

TRACE = 0xABC


@contextmanager
def active(span_id: int) -> Iterator[None]:
    found = trace.SpanContext(TRACE, span_id, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(found)):
        yield


def test_calls_in_a_span_are_the_steps(seen):
    run = Run("shop", id=f"{TRACE:032x}", session_id="s")
    agent = run.step("Guide", "agent")
    run.take_span(1, agent)
    with active(1):
        seen.call()
        with span("mine"):
            seen.call()
    with active(2):
        seen.call()  # of the same trace, but nobody has told of it
    agent.end("done")
    run.end()
    run.drop_span(1)
    with active(1):
        seen.call()

    named = [each for each in seen.of(TrajectoryInfo) if each.name == "shop"]
    assert {(each.id, each.session_id, each.origin) for each in named} == {(f"{TRACE:032x}", "s", "explicit")}
    own = [each.id for each in seen.of(SpanInfo) if each.name == "mine"]
    told = [(call.trajectory_id, call.span_id) for call in seen.of(Call)]
    assert told == [(run.id, agent.id), (run.id, *own), (run.id, f"{2:016x}"), (run.id, f"{1:016x}")]


def test_a_trace_of_the_app_gets_the_names(seen):
    with active(1):
        run = Run("shop", id="not asked", session_id="s", tags=["a"], metadata={"b": 1})
    run.take_span(2)
    with active(2):
        seen.call()
    run.end()
    (info,) = seen.of(TrajectoryInfo)
    assert (info.id, info.origin, info.name, info.session_id) == (f"{TRACE:032x}", "otel", "shop", "s")
    assert (info.tags, info.metadata) == (("a",), {"b": 1})
    run.drop_span(2)


def test_other_runs_and_spans_inside_hang_below(seen):
    run = Run("outer")
    tool = run.step("look", "tool")
    run.take_span(1, tool)
    with active(1):
        inner = Run("inner")
        node = inner.step("planner", "node")
        with inner.inside(node):
            seen.call()
        node.end()
        inner.end("not the end of the trajectory")
        with span("mine"):
            seen.call()
            run.take_span(2, tool)
            with active(2):
                seen.call()
    tool.end()
    run.end()
    run.drop_span(1)
    run.drop_span(2)
    spans = {each.name: each for each in seen.of(SpanInfo)}
    assert {name: each.parent_id for name, each in spans.items()} == {"look": None, "planner": tool.id, "mine": tool.id}
    told = [(call.trajectory_id, call.span_id) for call in seen.of(Call)]
    assert told == [(run.id, node.id), (run.id, spans["mine"].id), (run.id, tool.id)]
    assert {each.name for each in seen.of(TrajectoryInfo)} == {"outer"}


def test_inside_the_apps_own_trajectory(seen):
    with trajectory("app") as app, span("turn") as turn:
        run = Run("shop")
        agent = run.step("Guide", "agent")
        run.take_span(1, agent)
        with active(1):
            seen.call()
            with trajectory("another") as another:
                seen.call()
        agent.end()
        run.drop_span(1)
    told = [(call.trajectory_id, call.span_id) for call in seen.of(Call)]
    assert told[0] == (app.id, agent.id)
    assert told[1][0] == another.id
    assert {each.name: each.parent_id for each in seen.of(SpanInfo)}["Guide"] == turn


def test_spans_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ambient, "MOST_SPANS", 2)
    run = Run("shop")
    for span_id in (1, 2, 3):
        run.take_span(span_id)
    assert [span_id in ambient._spans for span_id in (1, 2, 3)] == [False, True, True]
    for span_id in (2, 3):
        run.drop_span(span_id)
