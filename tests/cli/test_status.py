"""`art-patch status` stays readable whatever has run."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from art_patch.store import open_store
from art_patch.types import AppReport
from tests.support.command_line import art_patch

FACTS: dict[str, Any] = {
    "mode": "record", "recorded": 1, "dropped": 0, "fallbacks": 0, "shadowed": 0, "bypasses": {"anthropic": 2},
    "instrumented": ["openai 2.54.0", "integration mcp.clients"], "degraded": ["The engine is not asked: no key."],
}  # fmt: skip


def status_of(home: Path, reports: list[AppReport]) -> str:
    store = open_store(f"sqlite:///{home}/default/store.db")
    store.write(reports)
    store.close()
    done = art_patch("status", home=home, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_hundred_processes_that_ended_are_four_lines(tmp_path: Path):
    now = time.time()
    ended = [AppReport(f"a-host-of-the-cluster:{10_000 + n}", now - 300 - n, FACTS) for n in range(200)]
    shown = status_of(tmp_path, [*ended, AppReport("old:1", now - 4_000, FACTS)])
    lines = shown[shown.index("groups") :].splitlines()[2:]
    assert lines == [
        "200 app processes in the last hour, most of them ended: 200 recorded, 0 dropped, 0 fell back, 0 shadowed",
        "200 processes: sees openai 2.54.0, integration mcp.clients",
        "200 processes: The engine is not asked: no key.",
        "400 calls went past the patch by anthropic",
    ]
    # Programs still read each of them.
    assert len(json.loads(art_patch("status", "--json", home=tmp_path).stdout)["apps"]) == 200


def test_running_processes_are_a_line_each_at_80_columns(tmp_path: Path):
    now = time.time()
    busy = FACTS | {"recorded": 123_456, "dropped": 12_345, "fallbacks": 1_234, "instrumented": ["openai 2.54.0"]}
    running = [AppReport(f"5f0c9a7e21bd:{10_000 + n}", now, busy) for n in range(12)]
    shown = status_of(tmp_path, [*running, AppReport("5f0c9a7e21bd:9", now - 500, FACTS)])
    lines = [line for line in shown.splitlines() if re.match("5f0c9a7e21bd:1", line)]
    assert len(lines) == 10 and all(line.split()[-4:] == ["record", "123456", "12345", "1234"] for line in lines)
    assert "3 app processes more in the last hour, most of them ended: 246913 recorded, 24690 dropped" in shown
