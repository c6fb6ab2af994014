"""`art-patch judge test` as a user meets it: a real process, a judge on a real socket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from art_patch.demo.judge import STAND_IN_MODEL, serve_stand_in_judge, shop_rule

pytestmark = pytest.mark.slow  # each process imports litellm

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")} | {"COLUMNS": "200"}


def judge_test(*arguments: str | Path, home: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "art_patch", "judge", "test", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        input=stdin,
        env=ENVIRONMENT | {"ART_PATCH_HOME": str(home)},
    )


def says(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("art-patch: ")
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with serve_stand_in_judge(shop_rule) as base_url:
        yield base_url


def shop_line() -> dict[str, Any]:
    function = {"name": "lookup", "arguments": '{"item": "plum"}'}
    lookup = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    answers = (("12", 1.0), ("13", 0.0), ("I will not say", 0.0))
    return {
        "task": "price of 3 plum?",
        "attempts": [
            {"messages": [lookup, result, {"role": "assistant", "content": text}], "label": label}
            for text, label in answers
        ],
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "labelled.jsonl"
    path.write_text(f"{json.dumps(shop_line())}\n" * 3)
    return path


def test_a_judge_is_measured(judge: str, file: Path, tmp_path: Path):
    shown = judge_test(file, "--judge", STAND_IN_MODEL, "--judge-base-url", judge, "--json", home=tmp_path)
    assert shown.returncode == 0, shown.stderr
    metrics = json.loads(shown.stdout)
    assert (metrics["judge"], metrics["groups"], metrics["calls"]) == (STAND_IN_MODEL, 3, 12)
    assert metrics["pairwise_accuracy"] == metrics["kendall_tau"] == metrics["resisted"] == 1.0
    assert metrics["position_bias"] == metrics["flips"] == 0.0 and metrics["cost_usd"] is None
    assert metrics["prompt_tokens"] > 0

    shown = judge_test("-", "--judge", STAND_IN_MODEL, "--judge-base-url", judge, home=tmp_path, stdin=file.read_text())
    assert shown.returncode == 0, shown.stderr
    for words in ("3 groups judged", "100.0%", "of 6 pairs", "12 calls", "unknown price", "resists pleas"):
        assert words in shown.stdout


def test_the_builtin_set_runs_at_once(judge: str, tmp_path: Path):
    shown = judge_test("--builtin", "--judge", STAND_IN_MODEL, "--judge-base-url", judge, "--json", home=tmp_path)
    assert shown.returncode == 0, shown.stderr
    metrics = json.loads(shown.stdout)
    assert (metrics["groups"], metrics["calls"], metrics["injections"]) == (12, 48, 12)


def test_a_mistake_is_one_clear_line_and_nothing_is_sent(file: Path, tmp_path: Path):
    to = ("--judge", STAND_IN_MODEL, "--judge-base-url", "http://127.0.0.1:9/v1")
    says(judge_test(*to, home=tmp_path), 2, "--builtin")
    says(judge_test(file, "--builtin", *to, home=tmp_path), 2, "one of both")
    says(judge_test(tmp_path / "none.jsonl", *to, home=tmp_path), 2, "none.jsonl", "cannot be read")
    says(judge_test(file, home=tmp_path), 7, "ART_PATCH_JUDGE")
    bad = shop_line()
    bad["attempts"][1]["label"] = 7
    file.write_text(f"{json.dumps(shop_line())}\n{json.dumps(bad)}\n")
    says(judge_test(file, *to, home=tmp_path), 15, "line 2", "attempts[1].label", "from 0 to 1", "nothing was sent")
    file.write_text("")
    says(judge_test(file, *to, home=tmp_path), 15, "nothing to compare")


def test_a_judge_that_refuses_is_exit_code_7(file: Path, tmp_path: Path):
    class Refuses(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1"
        shown = judge_test(file, "--judge", STAND_IN_MODEL, "--judge-base-url", address, "--json", home=tmp_path)
        server.shutdown()
    assert shown.returncode == 7 and json.loads(shown.stdout)["error"] == "JudgeError"
