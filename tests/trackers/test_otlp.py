"""Runs as traces: OpenTelemetry's own client, a real socket, the protobuf decoded and compared whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch._lib.ids import new_id
from art_patch.cli.app import app
from art_patch.errors import ConfigError, TrackerError
from art_patch.store import open_store
from art_patch.types import Call, Choice, Score, SpanInfo, TrajectoryInfo
from tests.trackers.collector import Collector, collecting

RUN = "0196d2f0a1b27c3d8e4f5a6b7c8d9e0f"
QUESTION = {"role": "user", "content": "What is a plum?"}
ANSWER = {"role": "assistant", "content": "A fruit."}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = open_store(f"sqlite:///{tmp_path}/shop/store.db")
    store.write([
        TrajectoryInfo(RUN, 100.0, "explicit", ended_at=110.0, name="buyer", scenario_key="plum", session_id="s1",
                       user_id="u1", tags=("web",)),
        SpanInfo("node", RUN, "search", 100.5, ended_at=104.0, kind="node"),
        SpanInfo("tool", RUN, "lookup", 101.0, parent_id="node", ended_at=102.0, kind="tool",
                 attributes={"input": {"item": "plum"}, "output": "31 cents"}, error="KeyError: plum"),
        Call("c1", RUN, 103.0, "gpt-5", (QUESTION,), (Choice(0, ANSWER, "stop"),), span_id="node", duration_ms=500.0,
             ttft_ms=250.0, policy="agent@1", params={"temperature": 0.5, "max_tokens": 9}, prompt_tokens=7,
             completion_tokens=3),
        Call("c2", RUN, 105.0, "gpt-5", (QUESTION,), span_id="gone", status="error", error="APITimeoutError: slow",
             fallback="breaker open"),
        Score("sc1", RUN, "thumbs", 1.0, "user", 120.0, comment="good"),
    ])  # fmt: skip
    store.close()
    return tmp_path


def send(home: Path, collector: Collector, *options: str) -> dict[str, Any]:
    words = ["send", "otlp", "--endpoint", collector.address, "--project", "shop", "--home", str(home), "--json"]
    result = CliRunner().invoke(app, [*words, *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def s(seconds: float) -> int:
    return int(seconds * 1e9)


def test_a_run_is_one_trace_that_is_read_back_whole(home: Path, collector: Collector):
    assert send(home, collector) == {
        "target": f"otlp {collector.address}", "episodes": 1, "steps": 0, "written": 6, "already_there": 0,
    }  # fmt: skip
    root, node, tool, answered, failed = collector.spans
    common = {"trace": RUN, "resource": {"service.name": "shop"}}
    whose = {"gen_ai.conversation.id": "s1", "art.trajectory.id": RUN, "art.scenario.id": "plum"}
    assert len({span["id"] for span in collector.spans}) == 5
    assert root == common | {
        "id": root["id"], "parent": "", "name": "invoke_agent buyer", "kind": 1, "start_ns": s(100), "end_ns": s(110),
        "status": (0, ""),
        "attributes": whose | {
            "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "buyer", "session.id": "s1", "user.id": "u1",
            "langfuse.trace.tags": ["web"], "art.origin": "explicit",
        },
    }  # fmt: skip
    assert node == common | {
        "id": node["id"], "parent": root["id"], "name": "search", "kind": 1, "start_ns": s(100.5), "end_ns": s(104),
        "status": (0, ""),
        "attributes": whose | {"art.span.name": "search", "art.span.id": "node", "art.span.kind": "node"},
    }  # fmt: skip
    assert tool == common | {
        "id": tool["id"], "parent": node["id"], "name": "execute_tool lookup", "kind": 1, "start_ns": s(101),
        "end_ns": s(102), "status": (2, "KeyError: plum"),
        "attributes": whose | {
            "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "lookup", "art.span.id": "tool",
            "art.span.kind": "tool", "error.type": "KeyError",
        },
    }  # fmt: skip
    assert answered == common | {
        "id": answered["id"], "parent": node["id"], "name": "chat gpt-5", "kind": 3, "start_ns": s(103),
        "end_ns": s(103.5), "status": (0, ""),
        "attributes": whose | {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "vllm", "gen_ai.request.model": "gpt-5",
            "gen_ai.response.model": "agent@1", "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.response.time_to_first_chunk": 0.25, "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": 3, "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 9,
            "art.span.id": "node", "art.call.id": "c1", "art.served_by": "agent@1",
        },
    }  # fmt: skip
    assert failed == common | {
        "id": failed["id"], "parent": root["id"], "name": "chat gpt-5", "kind": 3, "start_ns": s(105),
        "end_ns": s(105), "status": (2, "APITimeoutError: slow"),
        "attributes": whose | {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-5",
            "art.span.id": "gone", "art.call.id": "c2", "art.served_by": "upstream", "art.fallback": "breaker open",
            "error.type": "APITimeoutError",
        },
    }  # fmt: skip
    assert collector.logs == [{
        "trace": RUN, "span": root["id"], "event": "gen_ai.evaluation.result", "at_ns": s(120),
        "attributes": {
            "gen_ai.evaluation.name": "thumbs", "gen_ai.evaluation.score.value": 1.0, "art.score.id": "sc1",
            "art.score.source": "user", "art.trajectory.id": RUN,
        },
    }]  # fmt: skip


def test_texts_go_along_if_asked_for(home: Path, collector: Collector):
    send(home, collector, "--content")
    _, _, tool, answered, _ = (span["attributes"] for span in collector.spans)
    assert tool["gen_ai.tool.call.arguments"] == '{"item": "plum"}'
    assert tool["gen_ai.tool.call.result"] == "31 cents"
    assert json.loads(answered["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "What is a plum?"}]}
    ]
    assert json.loads(answered["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "A fruit."}], "finish_reason": "stop"}
    ]
    assert collector.logs[0]["attributes"]["gen_ai.evaluation.explanation"] == "good"


def test_a_second_time_adds_what_came_since_and_nothing_else(home: Path, collector: Collector):
    send(home, collector)
    first = len(collector.headers)
    assert send(home, collector)["written"] == 0
    assert len(collector.headers) == first
    store = open_store(f"sqlite:///{home}/shop/store.db")
    store.write([Score("sc1", RUN, "thumbs", 0.0, "user", 121.0), Score("sc2", RUN, "reward", 0.5, "code", 122.0)])
    exports = store.transfers.exports()
    assert [(one.path, one.format, one.trajectories) for one in exports] == [(f"otlp {collector.address}", "otlp", 1)]
    plan = store.rights.erase(user="u1", who="w", dry_run=True)
    assert [one.id for one in plan.exports] == [exports[0].id]
    store.close()
    assert send(home, collector) == {
        "target": f"otlp {collector.address}", "episodes": 1, "steps": 0, "written": 2, "already_there": 5,
    }  # fmt: skip
    values = [record["attributes"]["gen_ai.evaluation.score.value"] for record in collector.logs]
    assert (len(collector.spans), values) == (5, [1.0, 0.0, 0.5])


def test_what_a_collector_refuses_is_sent_again(home: Path, collector: Collector):
    collector.status = 400
    with pytest.raises(TrackerError, match=r"did not take spans \(.*400.*OTEL_EXPORTER_OTLP_HEADERS"):
        send(home, collector)
    collector.status = 200
    assert send(home, collector)["written"] == 6


def test_a_run_that_goes_on_waits_and_other_ids_get_a_trace_of_their_own(home: Path, collector: Collector):
    store = open_store(f"sqlite:///{home}/shop/store.db")
    store.write([TrajectoryInfo("mine", 90.0), Call("c3", "mine", 90.0, "gpt-5", (QUESTION,))])
    key = new_id()

    store.write([TrajectoryInfo(key, time.time()), Call("c4", key, time.time(), "gpt-5", (QUESTION,))])
    store.close()
    assert send(home, collector)["episodes"] == 2
    (trace_id,) = {span["trace"] for span in collector.spans} - {RUN}
    assert len(trace_id) == 32 and int(trace_id, 16)
    assert send(home, collector, "--settle", "0")["written"] == 2


def test_headers_are_the_clients_and_a_login_is_no_part_of_the_name(
    home: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
):
    from art_patch.trackers import Otlp

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    send(home, collector)
    assert {headers["x-key"] for headers in collector.headers} == {"secret"}
    assert Otlp("http://me:secret@host:4318/", service="x").target == "otlp http://host:4318"


def test_a_missing_package_is_named_with_its_extra(home: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.delattr("art_patch.trackers.Otlp")  # the folder keeps what it handed out once
    monkeypatch.delitem(sys.modules, "art_patch.trackers.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"pip install \"art-patch\[otlp\]\""):
        send(home, collector)
