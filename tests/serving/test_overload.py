"""More callers than the engine takes: what `tests/benchmarks/overload_engine.py` measures, small and without times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, json, pathlib, sys
import art_patch as art
from tests.benchmarks.overload_engine import engine, stretch, upstream

home = pathlib.Path(sys.argv[1])
with engine(home), upstream() as url, art.patch(project="bench", home=home, mode="route"):
    times, _, errors = asyncio.run(stretch(url, 150, 0.0))
    assert art.flush(60)
    status = art.status()
print(json.dumps({"errors": errors, "answered": sum(map(len, times.values())), "full": status.engine_full}))
"""


def test_a_crowd_gets_its_answers_from_the_engine_and_from_upstream(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["errors"] == {}
    assert found["answered"] >= 150
    assert found["full"] > 0
