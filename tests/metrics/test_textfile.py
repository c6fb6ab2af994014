"""`art-patch status --prometheus`, read by Prometheus' own parser and, where it is installed, by its own checker."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from art_patch import __version__
from art_patch._lib.words import visible
from art_patch.cli.app import app
from art_patch.errors import ConfigError, StoreError
from art_patch.metrics import CATALOGUE, gather
from art_patch.metrics.catalogue import Page
from art_patch.pipeline import keep_last_retrain
from art_patch.settings import load_settings
from art_patch.store import Store, open_store
from art_patch.types import AppReport, Policy
from tests.support.run_samples import fill

FACTS: dict[str, Any] = {
    "mode": "route", "recorded": 9, "dropped": 1, "fallbacks": 2, "engine_full": 1, "shadowed": 3, "queued": 4,
    "open_breakers": ["engine"], "bypasses": {"websocket": 2},
}  # fmt: skip
NOW = 5_000.0

Found = dict[tuple[str, str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Found:
    """Every sample by type, name and labels, the project left out."""
    found: Found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["project"] == "default"
            labels = frozenset(item for item in sample.labels.items() if item[0] != "project")
            assert (family.type, sample.name, labels) not in found
            found[family.type, sample.name, labels] = sample.value
    return found


def sample(kind: str, name: str, value: float, **labels: str) -> Found:
    return {(kind, f"art_patch_{name}", frozenset(labels.items())): value}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db", project="default")) as opened:
        yield opened


def test_every_metric_of_a_store(tmp_path: Path, store: Store):
    fill(store)
    ledger = store.ledger
    ledger.add_base("agent@0", "tiny", "0" * 64, who="test", now=1.0)
    gate = {"candidate": 0.8, "champion": 0.6, "lower_bound": 0.1, "scenarios": 30}
    for step in (1, 2):
        policy = Policy(f"agent@{step}", "tiny", "0" * 64, "candidate", float(step), None, "agent@0")
        ledger.add_candidate(policy, trained_on=[], who="test")
    ledger.move("agent@1", "champion", who="test", reason="better", metrics={"gate": gate}, now=10.0)
    ledger.move("agent@2", "canary", who="test", reason="try", percent=5.0, now=20.0)
    ledger.set_mode("canary", who="test")
    ledger.set_control_group(10.0, who="test")
    signals = {"reward": {"difference": -0.1, "error": 0.02}, "feedback": {"says": "no data"}}
    sides = {"champion": {"sessions": 90}, "upstream": {"sessions": 10}}
    ledger.keep_control_look({"at": 4_000.0, "policy": "agent@1", "says": "open", "signals": signals, **sides})
    ledger.set_engine("http://127.0.0.1:9/v1", who="test")
    keep_last_retrain(tmp_path / "default", ended_at=4_500.0, took_s=12.5, exit_code=7, outcome="JudgeError")
    store.write([
        AppReport("web:17", NOW - 60, FACTS),
        AppReport("old:1", NOW - 60, {"recorded": 1}),  # an earlier release
        AppReport("dead:1", NOW - 200, FACTS),
    ])  # fmt: skip
    page = gather(load_settings(home=tmp_path), store, now=NOW).text().decode()
    expected: Found = {}
    for name, value, labels in [
        ("info", 1, {"version": __version__}),
        *(("mode", mode == "canary", {"mode": mode}) for mode in ("off", "record", "shadow", "canary", "route")),
        *(("policies", 1, {"state": state}) for state in ("champion", "canary", "retired")),
        ("champion_step", 1, {"policy": "agent@1"}),
        ("challenger_share", 0.05, {"policy": "agent@2", "state": "canary"}),
        ("challenger_since_timestamp_seconds", 20.0, {"policy": "agent@2", "state": "canary"}),
        ("engine_up", 0, {}),
        ("calls_untrainable", 2, {"reason": "answered by upstream"}),
        ("scenarios", 2, {}),
        ("groups", 2, {"state": "scored"}),
        ("last_call_timestamp_seconds", 3_000.0, {}),
        ("recent_calls", 2, {"policy": "upstream"}), ("recent_calls", 12, {"policy": "agent@1"}),
        ("recent_calls_not_ok", 1, {"policy": "upstream"}), ("recent_calls_not_ok", 0, {"policy": "agent@1"}),
        ("recent_latency_mean_seconds", 0.0, {"policy": "upstream"}),
        ("recent_latency_mean_seconds", 0.5, {"policy": "agent@1"}),
        ("recent_runs", 2, {"policy": "upstream"}), ("recent_runs", 6, {"policy": "agent@1"}),
        ("recent_success_share", 0, {"policy": "upstream"}), ("recent_success_share", 4 / 6, {"policy": "agent@1"}),
        ("recent_rewarded_runs", 0, {"policy": "upstream"}), ("recent_rewarded_runs", 6, {"policy": "agent@1"}),
        ("recent_reward_mean", pytest.approx(1.85 / 3), {"policy": "agent@1"}),
        ("gate_score", 0.8, {"policy": "agent@1", "side": "candidate"}),
        ("gate_score", 0.6, {"policy": "agent@1", "side": "champion"}),
        ("gate_lower_bound", 0.1, {"policy": "agent@1"}),
        ("gate_scenarios", 30, {"policy": "agent@1"}),
        ("control_share", 0.1, {}),
        ("control_difference", -0.1, {"signal": "reward"}),
        ("control_difference_error", 0.02, {"signal": "reward"}),
        ("control_sessions", 90, {"side": "champion"}), ("control_sessions", 10, {"side": "upstream"}),
        ("control_look_timestamp_seconds", 4_000.0, {}),
        ("last_cycle_timestamp_seconds", 4_500.0, {}),
        ("last_cycle_exit_code", 7, {}),
        ("last_cycle_duration_seconds", 12.5, {}),
        ("last_cycle_outcome", 1, {"outcome": "JudgeError"}),
        ("app_queued", 4, {"process": "web:17"}),
        ("app_breaker_open", 1, {"process": "web:17", "breaker": "engine"}),
        ("app_breaker_open", 0, {"process": "web:17", "breaker": "challenger"}),
        *(("app_last_seen_timestamp_seconds", NOW - 60, {"process": process}) for process in ("web:17", "old:1")),
        ("store_bytes", store.maintain.size(), {}),
        ("store_read_timestamp_seconds", NOW, {}),
    ]:  # fmt: skip
        expected |= sample("gauge", name, value, **labels)
    counts = {
        "calls": 14, "calls_by_policy": 12, "calls_fell_back": 0, "calls_engine_full": 0, "calls_not_ok": 1,
        "calls_trainable": 12, "calls_shadow": 1, "calls_resampled": 0, "trajectories": 9, "scores": 6,
        "judge_calls": 0, "judge_prompt_tokens": 0, "judge_completion_tokens": 0, "judge_cost_usd": 0,
        "judge_unpriced": 0,
    }  # fmt: skip
    for name, value in counts.items():
        expected |= sample("counter", f"{name}_total", value)
    for name in ("recorded", "dropped", "fallbacks", "engine_full", "shadowed"):
        expected |= sample("counter", f"app_{name}_total", FACTS[name], process="web:17")
        expected |= sample("counter", f"app_{name}_total", name == "recorded", process="old:1")
    expected |= sample("counter", "app_bypassed_total", 2, process="web:17", bypass="websocket")
    assert read(page) == expected
    if checker := shutil.which("promtool"):
        subprocess.run([checker, "check", "metrics"], input=page, text=True, check=True)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_survives_as_a_label(text: str):
    page = Page("default")
    page.add("app_recorded", 9, process=text)
    assert read(page.text().decode()) == sample("counter", "app_recorded_total", 9, process=visible(text))


def test_no_counter_falls_by_a_deletion(tmp_path: Path, store: Store):
    fill(store)

    def counters() -> dict[Any, float]:
        found = read(gather(load_settings(home=tmp_path), store).text().decode())
        return {key: value for key, value in found.items() if key[0] == "counter"}

    before = counters()
    store.rights.erase(user="user-a")
    assert counters() == before


def status(tmp_path: Path, *options: str) -> Any:
    return CliRunner().invoke(app, ["status", "--prometheus", "--home", str(tmp_path), *options])


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch):
    fill(store)
    target = tmp_path / "textfile" / "art_patch.prom"
    result = status(tmp_path, "--output", str(target))
    assert isinstance(result.exception, ConfigError), "the directory is missing"
    target.parent.mkdir()
    assert (status(tmp_path, "--output", str(target)).exit_code, os.listdir(target.parent)) == (0, [target.name])
    assert stat.S_IMODE(target.stat().st_mode) == 0o644, "node_exporter is another user"
    before, inode = target.read_text(), target.stat().st_ino
    assert ("gauge", "art_patch_store_read_timestamp_seconds", frozenset()) in read(before)
    monkeypatch.setenv("ART_PATCH_STORE", "postgresql+psycopg://nobody@127.0.0.1:9/art")
    result = status(tmp_path, "--output", str(target))
    assert isinstance(result.exception, StoreError)
    assert result.exception.exit_code == 8
    assert (target.read_text(), target.stat().st_ino) == (before, inode)
    assert os.listdir(target.parent) == [target.name]


def test_one_form_at_a_time(tmp_path: Path):
    assert "--json" in str(status(tmp_path, "--json").exception)
    result = CliRunner().invoke(app, ["status", "--output", "x.prom", "--home", str(tmp_path)])
    assert "--prometheus" in str(result.exception)


def test_a_retrain_that_had_no_cycle_is_noted_too(tmp_path: Path, store: Store):
    """The store is there, and the engine is not."""
    fill(store)
    store.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
    home = ["--home", str(tmp_path)]
    assert CliRunner().invoke(app, ["retrain", "--judge", "openai/x", *home]).exit_code == 1
    found = read(status(tmp_path).stdout)
    assert found["gauge", "art_patch_last_cycle_exit_code", frozenset()] == 6
    assert found["gauge", "art_patch_last_cycle_outcome", frozenset({("outcome", "EngineError")})] == 1
    assert time.time() - found["gauge", "art_patch_last_cycle_timestamp_seconds", frozenset()] < 60
    listed = CliRunner().invoke(app, ["cycles", "--json", *home])
    assert json.loads(listed.stdout)["cycles"] == [], "it is no report of a cycle"


def test_the_catalogue_is_in_order():
    for name, metric in CATALOGUE.items():
        assert metric.help.endswith(".")
        assert name == metric.name and not name.endswith("_total")
        assert "project" not in metric.labels
