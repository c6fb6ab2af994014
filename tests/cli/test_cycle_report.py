"""What a person reads of a cycle."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art_patch.cli.commands.retrain import say_cycle
from art_patch.cli.options import Output

REPORT: dict[str, Any] = {
    "outcome": "promoted",
    "reason": "better",
    "champion": "agent@2",
    "candidate": "agent@2",
    "metrics": {
        "train": {
            "groups": 4,
            "rows": {"rows": 30, "tokens": 410, "left_out": {"top_p cuts the distribution": 2}},
            "not_imitated": {},
            "corrections_upto": 1e9,
            "loss": -0.123456,
            "stopped": None,
            "history": ({"loss": 1.0},),
        },
        "round_trips": {"first": "1 of 2 calls are what the chat template makes of them\n  before   '[/]'"},
    },
}


def test_metrics_are_read_at_a_glance(capsys: pytest.CaptureFixture[str]):
    say_cycle(REPORT)
    first, second, third, *metrics = capsys.readouterr().out.splitlines()
    assert first == "promoted agent@2: better"
    assert (second, third) == ("1 of 2 calls are what the chat template makes of them", "  before   '[/]'")
    assert " ".join(" ".join(metrics).split()) == (
        "train groups 4, rows (rows 30, tokens 410, left_out (top_p cuts the distribution 2)), loss -0.1235"
    )


def test_json_has_everything(capsys: pytest.CaptureFixture[str]):
    assert Output(as_json=True).answered(REPORT)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(REPORT))
