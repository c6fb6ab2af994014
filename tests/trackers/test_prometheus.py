"""The text that Prometheus scrapes, read by Prometheus' own parser."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from art_patch import __version__
from art_patch.cli.app import app
from art_patch.store import open_store
from art_patch.trackers import exposition
from art_patch.types import AppReport
from tests.support.run_samples import fill

FACTS: dict[str, Any] = {
    "project": "shop",
    "mode": "canary",
    "champion": "agent@3",
    "challenger": {"policy": "agent@4", "state": "canary", "percent": 5.0, "since": 1.0},
    "engine": {"base_url": "http://127.0.0.1:8000/v1", "healthy": False, "models": []},
    "policies": [{"name": f"agent@{step}", "state": "champion" if step == 3 else "retired"} for step in range(4)],
    "recorded": {
        "calls": 9, "calls_by_policy": 5, "calls_fell_back": 1, "calls_engine_full": 1, "calls_not_ok": 2,
        "calls_trainable": 5,
        "calls_shadow": 0, "calls_resampled": 3, "trajectories": 4, "scenarios": 2, "scores": 6,
        "last_call_at": 1_700_000_000.25, "groups": {"trained": 2, "formed": 1},
        "untrainable": {"answered by upstream": 4},
        "judge": {"calls": 2, "prompt_tokens": 300, "completion_tokens": 20, "cost_usd": 0.0125, "unpriced": 1},
    },
    "apps": [
        {"id": "web 17", "at": 1_700_000_001.0, "mode": "route", "recorded": 9, "dropped": 0, "fallbacks": 1,
         "engine_full": 1, "shadowed": 0, "instrumented": ["openai"], "bypasses": {"websocket": 2}, "degraded": []},
    ],
}  # fmt: skip


def read(text: str) -> dict[tuple[str, str, frozenset[tuple[str, str]]], float]:
    """Every sample by type, name and labels, the project left out."""
    found: dict[tuple[str, str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            labels = frozenset(item for item in sample.labels.items() if item[0] != "project")
            assert (family.type, sample.name, labels) not in found
            found[family.type, sample.name, labels] = sample.value
    return found


def expected() -> dict[tuple[str, str, frozenset[tuple[str, str]]], float]:
    recorded = FACTS["recorded"]
    gauges: list[tuple[str, dict[str, str], float]] = [
        ("info", {"version": "1"}, 1),
        *(("mode", {"mode": m}, m == "canary") for m in ("off", "record", "shadow", "canary", "route")),
        ("policies", {"state": "champion"}, 1),
        ("policies", {"state": "retired"}, 3),
        ("champion_step", {"policy": "agent@3"}, 3),
        ("challenger_share", {"policy": "agent@4", "state": "canary"}, 0.05),
        ("engine_up", {}, 0),
        *((key, {}, recorded[key]) for key in recorded if isinstance(recorded[key], int)),
        ("groups", {"state": "trained"}, 2),
        ("groups", {"state": "formed"}, 1),
        ("calls_untrainable", {"reason": "answered by upstream"}, 4),
        ("last_call_timestamp_seconds", {}, 1_700_000_000.25),
        *((f"judge_{key}", {}, value) for key, value in recorded["judge"].items()),
        ("app_last_seen_timestamp_seconds", {"process": "web 17"}, 1_700_000_001.0),
    ]
    counters: list[tuple[str, dict[str, str], float]] = [
        *((f"app_{key}_total", {"process": "web 17"}, FACTS["apps"][0][key])
          for key in ("recorded", "dropped", "fallbacks", "engine_full", "shadowed")),
        ("app_bypassed_total", {"process": "web 17", "bypass": "websocket"}, 2),
    ]  # fmt: skip
    return {
        (kind, f"art_patch_{name}", frozenset(labels.items())): float(value)
        for kind, samples in (("gauge", gauges), ("counter", counters))
        for name, labels, value in samples
    }


def test_every_figure_is_read_back_as_it_was():
    assert read(exposition(FACTS, version="1")) == expected()


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_text_survives_as_a_label(text: str):
    text = text.replace("\r", "")  # a line end to the parser's `splitlines`, not to the format
    found = read(exposition(FACTS | {"apps": [FACTS["apps"][0] | {"id": text}]}, version="1"))
    assert found["counter", "art_patch_app_recorded_total", frozenset({("process", text)})] == 9


def test_a_scrape_of_a_store(tmp_path: Any):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    fill(store)
    store.write([AppReport("x", 1.0, {})])  # too old to be shown
    store.close()
    result = CliRunner().invoke(app, ["status", "--prometheus", "--home", str(tmp_path)])
    found = read(result.stdout)
    assert found["gauge", "art_patch_info", frozenset({("version", __version__)})] == 1
    assert found["gauge", "art_patch_calls", frozenset()] > 10
    assert not [name for kind, name, _ in found if kind == "counter"]


def test_one_form_at_a_time(tmp_path: Any):
    result = CliRunner().invoke(app, ["status", "--prometheus", "--json", "--home", str(tmp_path)])
    assert result.exception is not None
    assert "--json" in str(result.exception)
