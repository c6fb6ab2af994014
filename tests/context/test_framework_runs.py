"""Runs told by events: whose calls are whose, whatever task or thread an event comes in."""

from __future__ import annotations

import threading

import pytest

from art_patch._lib.faults import faults
from art_patch.context import group, span, trajectory
from art_patch.context.integration import Run, guarded
from art_patch.types import Call, Score, SpanInfo, TrajectoryInfo
from tests.support.recordings import here


def test_a_run_is_written_whole(seen):
    with group("g"):
        run = Run("graph", session_id="thread-1", user_id="u", tags=["x"], metadata={"lang": "de"})
    node = run.step("planner", "node", input={"question": "Why?"})
    with run.inside(node):
        assert here() == run.id
        assert seen.call() == run.id
    tool = run.step("search", "tool", parent=node, input="why", call_id="c1")
    tool.end("because")
    node.end(error=ValueError("token=abc"))
    run.score("guardrail", 0, comment="tripped")
    run.end({"answer": "because"})

    first, last = seen.of(TrajectoryInfo)
    assert (first.name, first.origin, first.session_id, first.user_id) == ("graph", "explicit", "thread-1", "u")
    assert (first.tags, first.metadata, first.group_key, first.ended_at) == (("x",), {"lang": "de"}, "g", None)
    assert (last.id, last.error) == (run.id, None) and last.ended_at >= first.started_at
    shown = {each.name: (each.kind, each.parent_id, each.attributes, each.error) for each in seen.of(SpanInfo)}
    assert shown == {
        "search": ("tool", node.id, {"input": "why", "call_id": "c1", "output": "because"}, None),
        "planner": ("node", None, {"input": {"question": "Why?"}}, "ValueError: token=***"),
        "graph": ("agent", None, {"output": {"answer": "because"}}, None),
    }
    assert all(each.ended_at >= each.started_at for each in seen.of(SpanInfo))
    (call,) = seen.of(Call)
    assert (call.trajectory_id, call.span_id) == (run.id, node.id)
    (score,) = seen.of(Score)
    assert (score.trajectory_id, score.name, score.value, score.source, score.comment) == (
        run.id, "guardrail", 0.0, "code", "tripped",
    )  # fmt: skip


def test_a_run_without_a_call_leaves_nothing(seen):
    run = Run("idle")
    run.step("node").end()
    run.score("guardrail", 0)
    run.end("nothing")
    assert seen.of(object) == []


def test_steps_that_end_before_the_first_call_are_kept(seen):
    run = Run("graph")
    run.step("load", "tool").end("data")
    with run.inside():
        seen.call()
    run.end()
    assert [(each.name, each.trajectory_id) for each in seen.of(SpanInfo)] == [("load", run.id)]


def test_a_step_before_the_first_call_of_the_app_is_kept(seen):
    with trajectory("app") as app:
        Run().step("load", "retrieval").end("data")
        assert seen.call() == app.id
    with trajectory("idle"):
        Run().step("load", "retrieval").end("data")
    with span("whole"):
        Run().step("load", "retrieval").end("data")
        whole = seen.call()
    kept = [(each.name, each.trajectory_id) for each in seen.of(SpanInfo)]
    assert kept == [("load", app.id), ("whole", whole), ("load", whole)]


def test_it_takes_part_in_what_is_in_force(seen):
    with trajectory("app") as app, span("turn") as turn:
        run = Run("graph", session_id="not asked")
        step = run.step("node")
        with run.inside(step):
            seen.call()
        step.end()
        run.end()
        assert seen.call() == app.id == run.id
    assert [(call.trajectory_id, call.span_id) for call in seen.of(Call)] == [(app.id, step.id), (app.id, turn)]
    assert {each.name: each.parent_id for each in seen.of(SpanInfo)} == {"node": turn, "turn": None}
    assert [info.session_id for info in seen.of(TrajectoryInfo)] == [None, None]


def test_runs_of_one_id_are_one_trajectory(seen):
    for _ in range(2):
        run = Run("graph", id="thread-1-run")
        with run.inside():
            seen.call()
        run.end()
    assert {call.trajectory_id for call in seen.of(Call)} == {"thread-1-run"}


def test_what_turns_out_late(seen):
    run = Run("crew", session_id="s")
    with run.inside():
        seen.call()
    run.know(session_id="other", user_id="u")
    run.end()
    assert [(info.session_id, info.user_id) for info in seen.of(TrajectoryInfo)] == [("s", None), ("s", "u")]
    with trajectory(name="app"):
        inner = Run("crew")
        inner.know(session_id="s")
        with inner.inside():
            seen.call()
        inner.end()
    assert seen.of(TrajectoryInfo)[-1].session_id is None


def test_events_of_other_threads(seen):
    run = Run("graph")
    steps = [run.step(f"branch {number}") for number in range(8)]

    def branch(number: int) -> None:
        with run.inside(steps[number]):
            seen.call()
        steps[number].end()

    threads = [threading.Thread(target=branch, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.end()
    assert {call.span_id for call in seen.of(Call)} == {step.id for step in steps}
    assert {call.trajectory_id for call in seen.of(Call)} == {run.id}


def test_what_is_told_is_bounded(seen):
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError

    run = Run("graph")
    with run.inside():
        seen.call()
    deep: list[object] = []
    deep.append(deep)
    run.step("tool", input={"text": "x" * 10_000, "odd": Odd(), "deep": deep, "many": range(1000)}).end({1: 2})
    (step,) = seen.of(SpanInfo)
    given = step.attributes["input"]
    assert given["text"] == "x" * 4096 + "..."
    assert given["odd"] == "Odd"
    assert len(given["many"]) == 64
    assert step.attributes["output"] == {"1": 2}


def test_what_a_callback_raises_stays_with_us(seen, monkeypatch):
    @guarded("integrations.test")
    def callback() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        callback()
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert callback() is None
    assert faults.counts["integrations.test"] == 2
    faults.clear()
