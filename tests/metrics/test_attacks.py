"""Metrics of a store that strangers and other releases write to: nothing of theirs acts, or costs the others theirs."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from art_patch.metrics import StoreWatch, gather
from art_patch.settings import load_settings
from art_patch.store import Store, open_store
from art_patch.types import AppReport
from tests.support.proxies import until
from tests.support.store_samples import call, info

EVIL = 'a"b\\\n# HELP x\nart_patch_evil 1\n\x1b[2J\ud800' + "x" * 1_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db", project="default")) as opened:
        opened.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
        yield opened


def page(store: Store, home: Path) -> dict[str, dict[str, float]]:
    text = gather(load_settings(home=home), store).text().decode()
    assert not [character for character in text if ord(character) < 32 and character != "\n"]  # in labels it is escaped
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            assert all(len(value) <= 200 for value in each.labels.values())
            labels = " ".join(value for key, value in sorted(each.labels.items()) if key != "project")
            found.setdefault(each.name.removeprefix("art_patch_"), {})[labels] = each.value
    return found


@pytest.mark.parametrize(
    "facts",
    [
        [1], {"recorded": "9"}, {"recorded": None, "queued": 1, "open_breakers": None}, {"queued": 1},
        {"bypasses": [1]}, {"bypasses": {EVIL: 1}}, {"recorded": 10**400}, {"queued": {}, "bypasses": {"a": None}},
    ],
)  # fmt: skip
def test_an_app_that_reports_nonsense_costs_no_other_its_metrics(store: Store, tmp_path: Path, facts: Any):
    now = time.time()
    store.write([AppReport("ours:1", now, {"recorded": 7}), AppReport(EVIL.replace("\ud800", ""), now, facts)])
    found = page(store, tmp_path)
    assert found["app_recorded_total"]["ours:1"] == 7.0
    assert (found["policies"], "evil" in found) == ({"champion": 1.0}, False)


@pytest.mark.parametrize(
    "facts",
    [
        {"ended_at": "x"}, {"took_s": None}, {"exit_code": 10**400}, {"outcome": EVIL}, {"outcome": [1]},
        {"outcome": None},
    ],
)  # fmt: skip
def test_the_note_of_a_retrain_that_is_none(store: Store, tmp_path: Path, facts: Any):
    note: Any = {"ended_at": 1.0, "took_s": 1.0, "exit_code": 0, "outcome": "promoted"} | facts
    (tmp_path / "default" / "last_retrain.json").write_text(json.dumps(note))
    assert page(store, tmp_path)["policies"] == {"champion": 1.0}


def test_an_imported_file_makes_no_labels(store: Store, tmp_path: Path):
    now = time.time()
    for number in range(50):
        how = {"policy": f"evil@{number}", "untrainable": f"mia's secret {number}"}
        store.write([info(f"r{number}"), call(f"c{number}", f"r{number}", now, **how)])
    store.write([info("ours"), call("ours", "ours", now, policy="agent@0", untrainable="answered by upstream")])
    found = page(store, tmp_path)
    assert found["calls_untrainable"] == {"other": 50.0, "answered by upstream": 1.0}
    assert found["recent_calls"].keys() <= {"agent@0", "upstream"}


def test_a_server_goes_on_to_look_whatever_a_look_raised(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store.ledger.set_mode("route", who="test")
    path, stop = tmp_path / "default" / "store.db", Event()
    with closing(sqlite3.connect(path, isolation_level=None)) as raw:
        columns = "project_id, agent_id, key, value, updated_at"
        raw.execute(f"INSERT INTO control ({columns}) VALUES (1, 0, 'deleted', '{{', 0)")
        watch = StoreWatch(load_settings(home=tmp_path))
        thread = watch.start(stop)
        try:
            until(lambda: "JSONDecodeError" in caplog.text)
            assert watch.text == b""
            raw.execute("DELETE FROM control WHERE key = 'deleted'")
            until(lambda: b"art_patch_policies" in watch.text)
        finally:
            stop.set()
            thread.join()
