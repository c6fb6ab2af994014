"""Each app process tells the store how its patch is doing, and `art-patch status` shows it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import art_patch as art
from art_patch.cli import main
from art_patch.patching import control
from art_patch.store import open_store
from tests.support.proxies import until
from tests.support.sdk_samples import ASK


def reports(home: Any) -> tuple[Any, ...]:
    store = open_store(f"sqlite:///{home / 'default' / 'store.db'}")
    found = store.read.apps(since=0)
    store.close()
    return found


def test_the_store_and_the_command_line_know_of_the_process(bench, client, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("art_patch.patching.runtime.REPORT_EVERY_S", 0.0)
    art.patch(home=tmp_path, mode="record", poll_interval_s=0.02, flush_interval_s=0.005)
    client.chat.completions.create(**ASK)
    assert art.flush(10)
    deadline = time.monotonic() + 20
    while not (found := reports(tmp_path)) or found[0].facts["recorded"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (report,) = found
    assert report.id.endswith(f":{os.getpid()}")
    told = {key: report.facts[key] for key in ("mode", "recorded", "dropped", "bypasses", "degraded")}
    assert told == {"mode": "record", "recorded": 1, "dropped": 0, "bypasses": {}, "degraded": []}
    assert report.facts["instrumented"] == list(art.status().instrumented)
    assert report.facts["instrumented"][0].startswith("openai ")

    monkeypatch.setattr("sys.argv", ["art-patch", "status", "--home", str(tmp_path), "--json"])
    try:
        main()
    except SystemExit as stop:
        assert not stop.code
    (app,) = json.loads(capsys.readouterr().out)["apps"]
    assert (app["id"], app["recorded"]) == (report.id, 1)


def test_a_report_tells_since_when_a_breaker_is_open(bench, client, tmp_path, monkeypatch):
    monkeypatch.setattr("art_patch.patching.runtime.REPORT_EVERY_S", 0.0)
    art.patch(home=tmp_path, mode="record", poll_interval_s=0.02, flush_interval_s=0.005)
    breaker = control._process.runtime.breaker
    client.chat.completions.create(**ASK)  # the first one makes the store

    def told(opened: list[str]) -> dict[str, float]:
        until(lambda: [report.facts["open_breakers"] for report in reports(tmp_path)] == [opened])
        return reports(tmp_path)[0].facts["breakers_open_since"]

    assert told([]) == {}
    before = time.time()
    breaker.trip(time.monotonic())
    since = told(["engine"])
    assert before <= since["engine"] <= time.time()
    # A probe that fails leaves it open, since when it was.
    assert breaker.allow(time.monotonic() + 31)
    breaker.failed(time.monotonic() + 31)
    assert breaker.open_since == since["engine"]
    breaker.succeeded()
    assert told([]) == {}
