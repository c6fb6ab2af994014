"""The pages of cycles: their list, one of them, the one that runs, and how one is started."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_patch.pipeline import CycleReport
from art_patch.pipeline.cycle_run import write_report
from art_patch.pipeline.running_cycle import noting
from art_patch.settings import Settings, load_settings
from art_patch.store import open_store
from tests.support.web import Served, csrf_of, served

BEGAN = 1_790_000_000.0
EVIL = "<img src=x onerror=alert(1)>"
STEPS = [{"loss": 0.5 - step / 10, "kl_nats": 0.01 * step, "grad_norm": float("nan"), "phase": EVIL} for step in (1, 2)]
TRAIN = {"start": "agent@0", "mean_reward": 0.25, "loss": 0.3, "history": STEPS, "config": {"seed": 7}}
GATE = {
    "scenarios": 21, "candidate": 0.7, "champion": 0.6, "difference": 0.1, "lower_bound": 0.05,
    "gains": [{"name": "the judge", "mean": 0.1, "low": 0.04, "high": 0.16, "count": 21, "unit": "scenarios"}],
    "checks": [
        {"name": "cut off", "passed": False, "words": f"cut off {EVIL}"},
        {"name": "empty", "passed": True, "words": "empty answers 0 against 0"},
    ],
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Settings:
    settings = load_settings(home=tmp_path, project="bot")
    settings.directory.mkdir(parents=True)
    open_store(settings.store_url, project="bot").close()
    return settings


@pytest.fixture
def reported(project: Settings) -> Settings:
    """The project with three cycles."""
    stages = {"group": 1.0, "train": 3.0}
    ended: tuple[tuple[Any, str, dict[str, Any]], ...] = (
        ("nothing to do", "0 of 4 scored groups", {}),
        ("rejected", f"scores 0.7; besides, {EVIL}", {"train": TRAIN, "gate": GATE}),
        ("failed", "EngineError: it is down", {"score": {"groups": 3, "cost_usd": 0.5}}),
    )
    for number, (outcome, reason, metrics) in enumerate(ended):
        report = CycleReport(outcome, reason, None, "agent@1" if metrics else None, metrics)
        began = BEGAN + 100 * number
        write_report(report, project.directory, who="ada", began_at=began, took_s=4.0, stages_s=stages)
    return project


@pytest.fixture
def server(reported: Settings) -> Iterator[Served]:
    with served(reported) as running:
        yield running


def json_of(server: Served, path: str) -> Any:
    with server.client() as client:
        answer = client.get(f"/api/v1/bot/{path}", headers={"authorization": f"Bearer {server.key('bot')}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_list_has_the_newest_first_and_says_what_the_next_one_waits_for(server: Served):
    facts = json_of(server, "cycles")
    shown = [(each["outcome"], each["exit_code"], each["judge_usd"], each["who"]) for each in facts["cycles"]]
    assert shown == [("failed", 6, 0.5, "ada"), ("rejected", 4, 0.0, "ada"), ("nothing to do", 0, 0.0, "ada")]
    assert facts["waits"] == ["no policy serves yet; start `art-patch serve --base MODEL`"]
    assert (facts["running"], facts["log"], facts["last_retrain"], facts["older"]) == (None, None, None, None)
    assert facts["by_cycle"] == {
        "x": [BEGAN, BEGAN + 100, BEGAN + 200],
        "series": {
            "reward of the groups": [None, 0.25, None],
            "candidate": [None, 0.7, None],
            "champion": [None, 0.6, None],
        },
    }
    first = json_of(server, "cycles?limit=2")
    assert [each["outcome"] for each in first["cycles"]] == ["failed", "rejected"]
    rest = json_of(server, f"cycles?limit=2&before={first['older']}")
    assert ([each["outcome"] for each in rest["cycles"]], rest["older"]) == (["nothing to do"], None)


def test_one_cycle_has_stages_curves_and_the_gate(server: Served):
    listed = json_of(server, "cycles")["cycles"]
    facts = json_of(server, f"cycles/{listed[1]['id']}")
    assert facts["timeline"] == [
        {"name": "group", "seconds": 1.0, "begin": 0.0, "share": 0.25},
        {"name": "train", "seconds": 3.0, "begin": 0.25, "share": 0.75},
    ]
    curves = facts["curves"]
    assert (curves["steps"], curves["of"]) == ([1, 2], 2)
    assert [(each["name"], each["values"]) for each in curves["curves"]] == [
        ("loss", [0.4, 0.3]),
        ("kl_nats", [0.01, 0.02]),
    ]
    gate = facts["gates"]["gate"]
    assert (gate["difference"], gate["bound"], gate["low"], gate["high"], gate["proven"]) == (
        0.1, 0.05, 0.04, 0.16, True,
    )  # fmt: skip
    assert "mean_reward 0.25" in facts["lines"]["train"]
    assert not [line for line in facts["lines"]["train"] if "history" in line]


def test_pages_show_hostile_words_as_words(server: Served):
    listed = json_of(server, "cycles")["cycles"]
    with server.entered() as client:
        for path in ("cycles", *(f"cycles/{each['id']}" for each in listed), "cycles/start"):
            page = client.get(f"/p/bot/{path}")
            assert page.status_code == 200
            assert EVIL not in page.text
            assert "style=" not in page.text
        page = client.get(f"/p/bot/cycles/{listed[1]['id']}").text
        assert "Checks that failed" in page
        assert "&lt;img src=x" in page


@pytest.mark.parametrize("key", ["20200101T000000Z-ffffffff", "..%2f..%2fstore", "%2e%2e%2fcycles%2fx", "*"])
def test_an_unknown_cycle_is_not_found(server: Served, key: str):
    with server.entered() as client:
        assert client.get(f"/p/bot/cycles/{key}").status_code == 404


def test_the_cycle_that_runs_is_shown_by_stage_and_no_second_one_starts(server: Served, reported: Settings):
    def nothing(stage: str, done: int, total: int, note: str = "") -> None:
        pass

    with noting(reported.directory, nothing, who="cron", began_at=time.time() - 90) as note, server.entered() as client:
        note("group", 4, 4)
        note("train", 3, 48)
        running = json_of(server, "cycles")["running"]
        assert running["who"] == "cron"
        assert [(each["name"], each["done"], each["total"]) for each in running["stages"]] == [
            ("group", 4, 4),
            ("train", 3, 48),
        ]
        page = client.get("/p/bot/cycles").text
        assert '<progress value="3" max="48"' in page
        assert "cycles/start" not in page
        asked = client.get("/p/bot/cycles/start")
        assert "a cycle is running" in asked.text
        sent = client.post("/p/bot/cycles/start", data={"csrf": csrf_of(asked), "who": "ada"})
        assert (sent.status_code, "a cycle is running" in sent.text) == (409, True)
    assert json_of(server, "cycles")["running"] is None


def test_a_cycle_is_started_as_a_process_of_its_own(server: Served, reported: Settings):
    with server.entered() as client:
        asked = client.get("/p/bot/cycles/start")
        assert "art-patch retrain --project bot" in asked.text
        form = {"csrf": csrf_of(asked), "who": ""}
        assert client.post("/p/bot/cycles/start", data=form).status_code == 409
        page = client.post("/p/bot/cycles/start", data=form | {"who": "ada"})
        assert page.status_code == 200
        assert "a cycle was started as process" in page.text
        assert "a cycle was started as process" not in client.get("/p/bot/cycles").text
    until = time.monotonic() + 60
    while (facts := json_of(server, "cycles"))["last_retrain"] is None or facts["running"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    log = reported.directory / "retrain.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert facts["last_retrain"]["outcome"] == "nothing to do", log.read_text()
    assert "nothing to do" in facts["log"]["last_line"] or "nothing to do" in log.read_text()


def test_who_may_only_look_starts_none(reported: Settings):
    with served(reported, role="look") as running, running.entered() as client:
        page = client.get("/p/bot/cycles/start")
        assert "for looking only" in page.text
        csrf = csrf_of(page)
        assert client.post("/p/bot/cycles/start", data={"csrf": csrf, "who": "eve"}).status_code == 403
        assert "Start a cycle</a>" not in client.get("/p/bot/cycles").text
    assert not (reported.directory / "retrain.log").exists()


def test_a_project_without_cycles_says_what_to_do(project: Settings):
    with served(project) as running, running.entered() as client:
        page = client.get("/p/bot/cycles").text
    assert "No cycle has left a report yet" in page
    assert "art-patch retrain" in page


def test_a_damaged_report_is_left_out(reported: Settings):
    (reported.directory / "cycles" / "20991231T000000Z-aaaaaaaa.json").write_text("{")
    odd = {"outcome": "rejected", "began_at": BEGAN, "metrics": {"train": "x", "gate": [1]}, "reason": None}
    (reported.directory / "cycles" / "20981231T000000Z-bbbbbbbb.json").write_text(json.dumps(odd))
    with served(reported) as running, running.entered() as client:
        assert json_of(running, "cycles")["cycles"][0]["outcome"] == "rejected"
        assert client.get("/p/bot/cycles/20981231T000000Z-bbbbbbbb").status_code == 200
        assert client.get("/p/bot/cycles/20991231T000000Z-aaaaaaaa").status_code == 404
