"""A cycle's report on disk: what a person and a program read, and how many stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from art_patch.pipeline import cycle_run as module
from art_patch.pipeline.cycle_run import CycleReport, write_report

METRICS: dict[str, Any] = {
    "score": {"groups": 4, "unscored": 0, "cost_usd": 0.0125},
    "train": {
        "loss": -0.123456,
        "stopped": None,
        "rows": {"rows": 30, "left_out": {"too long": 2}},
        "history": [{"loss": 1.0}],
        "round_trips": {"first": "what a user said"},
    },
    "gate": {"turns": 8, "cost_usd": None},
}
REPORT = CycleReport("promoted", "better,\nby far", "agent@2", "agent@2", METRICS)

MARKDOWN = """\
# promoted: agent@2

better, by far

- began 2001-09-09 01:46:40 UTC, took 61 s
- champion agent@2
- started by me (art-patch retrain)
- the judge cost 0.0125 USD, as far as known

## score

- groups: 4
- unscored: 0
- cost_usd: 0.0125

## train

- loss: -0.1235
- rows: (rows 30, left_out (too long 2))

## gate

- turns: 8
"""


def test_a_report_is_kept_for_people_and_for_programs_and_quotes_nobody(tmp_path: Path):
    path = write_report(
        REPORT, tmp_path, who="me (art-patch retrain)", began_at=1e9, took_s=61.25, stages_s={"train": 60.12345}
    )
    assert path is not None
    assert path.name.startswith("20010909T014640Z-")
    assert path.with_suffix(".md").read_text() == MARKDOWN
    train = {key: value for key, value in METRICS["train"].items() if key != "round_trips"}
    assert json.loads(path.read_text()) == {
        "outcome": "promoted",
        "reason": "better,\nby far",
        "champion": "agent@2",
        "candidate": "agent@2",
        "metrics": METRICS | {"train": train},
        "began_at": 1e9,
        "took_s": 61.25,
        "stages_s": {"train": 60.123},
        "who": "me (art-patch retrain)",
    }
    assert sorted(one.suffix for one in (tmp_path / "cycles").iterdir()) == [".json", ".md"]


def test_the_newest_stay(tmp_path: Path):
    nothing = CycleReport("nothing to do", "no calls", None)
    for day in range(module.KEPT + 3):
        write_report(nothing, tmp_path, who="me", began_at=day * 86_400.0, took_s=0.0)
    names = sorted(path.name for path in (tmp_path / "cycles").glob("*.json"))
    assert (len(names), names[0][:8]) == (module.KEPT, "19700104")
    assert len(list((tmp_path / "cycles").glob("*.md"))) == module.KEPT


def test_a_report_that_cannot_be_written_fails_nothing(tmp_path: Path):
    (tmp_path / "cycles").write_text("a file")
    assert write_report(REPORT, tmp_path, who="me", began_at=1e9, took_s=1.0) is None
