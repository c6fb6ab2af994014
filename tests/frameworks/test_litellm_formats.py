"""LiteLLM asks thirty providers, each in its own format: every call is recorded as it was answered, or it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.litellm_formats import TEXT, speaking
from tests.support.recorded import store_url, trajectories

APP = Path(__file__).parent / "litellm_formats_app.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed"),
]

LEAST = 20
"""Providers that answer in each of the four ways; a release of LiteLLM may break or drop some."""


def test_every_call_to_every_provider_is_recorded_or_told(tmp_path: Path):
    url = store_url(tmp_path)
    with speaking() as (address, paths):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(APP), url, address],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["errors"] == {}
    recorded: dict[str, list[Any]] = defaultdict(list)
    for call in (call for run in trajectories(url) for call in run.calls):
        # Each question names its model and way.
        recorded[call.messages[-1]["content"]].append((call.status, [one.message["content"] for one in call.choices]))

    answered: Counter[str] = Counter()
    for question, (got, told) in said["found"].items():
        if got == TEXT:
            answered[question.partition(" ")[0]] += 1
            assert told or recorded[question] == [("ok", [TEXT])], question
        else:  # LiteLLM has raised, before or after it asked
            assert isinstance(got, list), (question, got)
            assert told or len(recorded[question]) <= 1, question
    in_all_ways = [model for model, ways in answered.items() if ways == 4]
    assert len(in_all_ways) >= LEAST, said["found"]
    assert len(paths) >= 4 * len(in_all_ways)
