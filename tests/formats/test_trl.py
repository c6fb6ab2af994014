"""TRL's own loaders and trainers take what we export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_patch.cli.commands.files import export
from art_patch.store import Store
from tests.support.run_samples import SYSTEM, TOOL, asked, plain_run, tool_run, write

ROOT = Path(__file__).parents[2]
FORMATS = ("chat", "sft", "sft-prompt", "preference", "grpo")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_format_trains(filled: Store, url: str, tmp_path: Path):
    other_tool = {
        "type": "function",
        "function": {"name": "weigh", "parameters": {"type": "object", "properties": {"kg": {"type": "number"}}}},
    }
    run = tool_run("other", "fig", "31", started_at=5_000.0)
    calls = tuple(_with_tools(call, (other_tool,)) for call in run.calls)
    write(filled, type(run)(run.info, calls), plain_run("plain-2", "hi", "hello", started_at=5_100.0))
    files = tmp_path / "files"
    files.mkdir()
    for format in FORMATS:
        for suffix in ("jsonl", "parquet"):
            name, _, style = format.partition("-")
            export(str(files / f"{format}.{suffix}"), format=name, style=style or "messages", store=url)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    script = ROOT / "tests" / "formats" / "train_with_trl.py"
    result = subprocess.run(
        [sys.executable, str(script), str(files)], capture_output=True, text=True, env=environment, timeout=580
    )
    assert result.returncode == 0, result.stderr[-3_000:]
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert {name: facts["step"] for name, facts in told.items()} == {
        f"{format}.{suffix}": 1 for format in FORMATS for suffix in ("jsonl", "parquet")
    }
    for format in FORMATS:
        assert told[f"{format}.jsonl"]["rows"] == told[f"{format}.parquet"]["rows"]
    assert told["sft.parquet"]["text"] == told["sft.jsonl"]["text"]
    (trained,) = [text for text in told["sft.jsonl"]["text"] if "plum 2" in text]
    assert '{"name": "lookup", "arguments": {"item": "plum"}}' in trained
    assert json.dumps(TOOL) in trained
    (other,) = [text for text in told["sft.jsonl"]["text"] if "weigh" in text]
    assert '{"name": "weigh", "parameters": {"type": "object", "properties": {"kg": {"type": "number"}}}}' in other
    assert told["preference.parquet"]["first"]["prompt"] == [SYSTEM, asked("plum")]


def _with_tools(call: Any, tools: Any) -> Any:
    from dataclasses import replace

    return replace(call, tools=tools)
