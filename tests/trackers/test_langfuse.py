"""Runs, scores and training in Langfuse: its real client, against a stand-in of its server that decodes what came."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from art_patch.cli.app import app
from art_patch.errors import ConfigError, TrackerError
from art_patch.store import open_store
from art_patch.trackers import trace_id_of
from art_patch.types import Call, Choice, Score, TrajectoryInfo
from tests.trackers.collector import Collector, collecting
from tests.trackers.policies import filled, run


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk")
    with collecting() as collector:
        yield collector


def send(home: Path, server: Collector, *options: str) -> dict[str, Any]:
    words = ["send", "langfuse", "--base-url", server.address, "--project", "shop", "--home", str(home), "--json"]
    result = CliRunner().invoke(app, [*words, *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def write(home: Path, *records: Any) -> None:
    store = open_store(f"sqlite:///{home}/shop/store.db")
    store.write(records)
    store.close()


def test_runs_and_scores_arrive_whole_once(tmp_path: Path, server: Collector):
    answer = Choice(0, {"role": "assistant", "content": "yes"}, "stop")
    write(
        tmp_path,
        TrajectoryInfo("t", 100.0, "explicit", name="buyer", session_id="s1", user_id="u1", tags=("web",)),
        Call("c", "t", 101.0, "gpt-5", ({"role": "user", "content": "hi"},), (answer,), duration_ms=500.0),
        Score("s", "t", "ruler", 0.5, "ruler", 120.0, comment="brief", rubric="r1", judge="o3"),
    )
    target = f"langfuse {server.address} pk"
    first = send(tmp_path, server)
    assert first == {"target": target, "episodes": 1, "steps": 0, "written": 3, "already_there": 0}
    root, call = server.spans
    trace_id = trace_id_of("t")
    of_all = {
        "langfuse.trace.name": "buyer", "session.id": "s1", "user.id": "u1", "langfuse.trace.tags": ["web"],
        "gen_ai.conversation.id": "s1", "art.trajectory.id": "t",
    }  # fmt: skip
    assert (root["trace"], root["parent"], call["trace"], call["parent"]) == (trace_id, "", trace_id, root["id"])
    assert root["attributes"] == of_all | {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "buyer", "art.origin": "explicit",
    }  # fmt: skip
    assert call["attributes"] == of_all | {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai", "gen_ai.request.model": "gpt-5",
        "gen_ai.response.finish_reasons": ["stop"], "art.call.id": "c", "art.served_by": "upstream",
    }  # fmt: skip
    whole = {
        "id": "s", "traceId": trace_id, "name": "ruler", "value": 0.5, "timestamp": "1970-01-01T00:01:40Z",
        "metadata": {"source": "ruler", "judge": "o3", "rubric": "r1", "at": 120.0},
        "comment": None,
    }  # fmt: skip
    assert server.scores == [whole]
    assert {headers["authorization"] for headers in server.headers} == {f"Basic {base64.b64encode(b'pk:sk').decode()}"}
    assert send(tmp_path, server) == first | {"written": 0, "already_there": 3}
    write(tmp_path, Score("s", "t", "ruler", 0.75, "ruler", 130.0, comment="brief", rubric="r1", judge="o3"))
    assert send(tmp_path, server)["written"] == 1
    changed = whole["metadata"] | {"at": 130.0}
    assert server.scores[1:] == [whole | {"value": 0.75, "metadata": changed}]
    assert len(server.spans) == 2


def test_a_policys_training_is_a_trace_that_follows_its_metrics(tmp_path: Path, server: Collector):
    store = filled(tmp_path)
    send(tmp_path, server, "--since", "1d")
    base, trained = (span for span in server.spans if span["name"].startswith("training"))
    prefix = "langfuse.trace.metadata."
    assert base["attributes"][f"{prefix}reward.mean"] == 0.25
    assert trained["attributes"] == {
        "langfuse.trace.name": "training agent@1", "langfuse.trace.tags": ["training"],
        f"{prefix}gate.lower_bound": 0.0625, f"{prefix}gate.scenarios": 9.0, f"{prefix}gate.won": 1.0,
        f"{prefix}reward.mean": 1.0, f"{prefix}reward.runs": 1.0, f"{prefix}train.kl_nats": 0.125,
        f"{prefix}train.loss": 0.375, f"{prefix}state": "champion", f"{prefix}parent": "agent@0",
        f"{prefix}base": "/base", f"{prefix}config.learning_rate": "0.0001",
        f"{prefix}config.loss": '{"name": "grpo"}',
    }  # fmt: skip
    run(store, "d", "agent@1", 0.0)
    store.close()
    assert send(tmp_path, server, "--since", "1d")["written"] == 1
    again = server.spans[-1]
    assert (again["trace"], again["id"]) == (trained["trace"], trained["id"])
    assert again["attributes"][f"{prefix}reward.mean"] == 0.5


def test_what_langfuse_rejects_is_sent_again(tmp_path: Path, server: Collector):
    write(tmp_path, TrajectoryInfo("t", 100.0), Score("s", "t", "thumbs", 1.0, "user", 120.0))
    server.rejects = 1
    with pytest.raises(TrackerError, match=r"1 scores \(no such trace\).*LANGFUSE_SECRET_KEY"):
        send(tmp_path, server)
    server.rejects = 0
    assert send(tmp_path, server)["written"] == 2


def test_without_keys_it_says_where_they_are(tmp_path: Path, server: Collector, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_SECRET_KEY; Langfuse shows them"):
        send(tmp_path, server)
