"""`tests/gpu/run.sh` without a card: everything is measured, and what it computes is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import measure

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("flash", "masks", "tiles")
SIZES = ("0.6b", "8b", "32b")
WORKS = ("siblings", "turns")


def run(*options: str) -> tuple[str, dict[str, Any]]:
    """The table, and the object of the last line."""
    line = ["bash", "tests/gpu/run.sh", "--cpu", *options]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    table, _, last = done.stdout.strip().rpartition("\n")
    return table, json.loads(last)


@pytest.mark.slow
def test_everything_is_measured_and_right():
    table, metrics = run()
    assert metrics["why_not"] == {}
    assert metrics["missed"] == []
    assert set(metrics) == {
        *("date", "device", "torch", "transformers", "peft", "seconds", "why_not", "missed", "kernel_works"),
        *(f"gap_{way}" for way in WAYS),
        *(f"tree_{way}_s" for way in WAYS),
        *(f"row_vs_flash_{size}" for size in SIZES),
        *(f"row_flash_{size}_s" for size in SIZES),
        *(f"row_operations_{way}" for way in ("flash", "tiles")),
        *(f"{kind}_bf16_{what}" for kind in measure.KINDS for what in ("logprob", "gradient")),
        *(f"{precision}_{what}_gap" for precision in ("fp32", "bf16") for what in ("logprob", "gradient")),
        *(f"{work}_tiny_tokens_per_s" for work in WORKS),
        *(f"{work}_tiny_{side}_s" for work in WORKS for side in ("ours", "plain", "trl")),
        *(f"{work}_tiny_vs_{side}" for work in WORKS for side in ("plain", "trl")),
        *(f"0.6b_{work}_tokens_per_s" for work in ("row_4k", "row_32k", "siblings_32k")),
        "0.6b_row_32k_vs_plain",
    }
    assert metrics["kernel_works"] == 1
    assert metrics["row_operations_flash"] <= 20
    assert 0 < metrics["fp32_logprob_gap"] <= 1e-5  # not 0: the card's way is another
    assert 0 < metrics["fp32_gradient_gap"] <= 1e-5
    assert all(line.split()[0] in metrics or line.startswith("missed: none") for line in table.splitlines())


def test_a_section_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    asked = measure.in_process("8b", False, 60)  # no card
    assert asked == ({"why_not": {}}, "its process ended with 1")
    assert measure.in_process("attention", True, 0.01) == ({"why_not": {}}, "not done after 0 s")


def test_what_cannot_be_measured_is_told(capsys: pytest.CaptureFixture[str]):
    section = measure.Section("attention", True)

    def fail() -> dict[str, Any]:
        raise MemoryError("no\nmore")

    section.tell("row", fail)
    assert json.loads(capsys.readouterr().out) == {"why_not": {"row": "MemoryError: no more"}}
