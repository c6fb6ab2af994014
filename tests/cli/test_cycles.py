"""`art-patch cycles` on reports and a log as a night leaves them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from art_patch.pipeline.cycle_run import CycleReport, write_report
from art_patch.store import open_store
from art_patch.types import Policy
from tests.support.command_line import art_patch, says

STAGES = {"score": 60.0, "train": 600.0, "nothing": 0.0}
REPORTS = [
    (CycleReport("failed", "JudgeError: it answers 401", "agent@0"), 50.0),
    (CycleReport("failed", "NameError: a mistake of ours", "agent@0"), 40.0),
    (
        CycleReport(
            "rejected", "not better", "agent@0", "agent@1",
            {"score": {"cost_usd": 0.25}, "gate": {"cost_usd": None, "scenarios": 9, "history": [1]}, "note": "a word"},
        ),
        30.0,
    ),
    (CycleReport("promoted", "better " * 30, "agent@2", "agent@2", {"score": {"cost_usd": 0.5}}), 20.0),
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.ledger.add_base("agent@0", "/base", "ff", who="ada")
    store.close()
    for report, hours in REPORTS:
        write_report(
            report, tmp_path / "default", who="ada (art-patch retrain)", began_at=time.time() - hours * 3600,
            took_s=900.0, stages_s=STAGES,
        )  # fmt: skip
    (tmp_path / "default" / "cycles" / "20200101T000000Z-broken.json").write_text("{")
    return tmp_path


def test_the_last_cycles_with_their_exit_codes_and_costs(home: Path):
    told = json.loads(art_patch("cycles", "--json", home=home).stdout)
    assert [(one["outcome"], one["exit_code"], one["judge_usd"]) for one in told["cycles"]] == [
        ("promoted", 0, 0.5), ("rejected", 4, 0.25), ("failed", None, 0), ("failed", 7, 0),
    ]  # fmt: skip
    assert [one["judge_usd_is_whole"] for one in told["cycles"]] == [True, False, True, True]
    assert told["cycles"][0]["stages_s"] == STAGES
    assert told["log"] is None
    assert json.loads(art_patch("cycles", "-n", "1", "--json", home=home).stdout)["kept"] == 4


def test_they_read_well_in_80_columns_and_ids_are_whole(home: Path):
    (home / "default" / "retrain.log").write_text("score: 3/3\nart-patch: no engine is running\n\n")
    shown = art_patch("cycles", home=home, COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert all(
        path.stem in shown for path in (home / "default" / "cycles").glob("*-*.json") if "broken" not in path.stem
    )
    flat = " ".join(shown.split())
    for words in (
        "rejected agent@1", "20 h ago; took 15 min, judge $0.5000, exit code 0", "$0.2500 or more", "exit code 7",
        "exit code unknown", "score 60.0 s, train 10 min", "retrain.log was last written", "no engine is running",
        "0 of 4 scored groups that an update needs", "0 groups are held out",
    ):  # fmt: skip
        assert words in flat


def test_one_report(home: Path):
    (rejected,) = [path for path in (home / "default" / "cycles").glob("*.json") if '"rejected"' in path.read_text()]
    shown = art_patch("cycles", "show", rejected.stem[:18], home=home, COLUMNS="80").stdout
    assert "scenarios 9" in shown and "a word" in shown and "history" not in shown
    told = json.loads(art_patch("cycles", "show", rejected.stem, "--json", home=home).stdout)
    assert (told["id"], told["who"]) == (rejected.stem, "ada (art-patch retrain)")
    says(art_patch("cycles", "show", "1999", home=home), 19, "1999", "art-patch cycles")
    says(art_patch("cycles", "show", "20", home=home), 2, "several ids")
    says(art_patch("cycles", "-n", "1", "show", "20", home=home), 2, "go behind")


def test_where_no_cycle_ran_it_says_so_and_what_the_next_one_does(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    store.ledger.add_base("agent@0", "/base", "ff", who="ada")
    store.ledger.add_candidate(
        Policy("agent@1", "/base", "ff", "candidate", 1.0, "/a", "agent@0"), trained_on=(), who="w"
    )
    store.ledger.move("agent@1", "canary", who="ada", reason="test", percent=5.0)
    store.close()
    shown = " ".join(art_patch("cycles", home=tmp_path, COLUMNS="80").stdout.split())
    assert "no cycle has left a report" in shown
    assert "no retrain.log" in shown
    assert "looks after agent@1, which is tested as a canary" in shown
