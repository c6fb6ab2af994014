"""No escape sequence reaches a terminal or a file, whoever wrote the text: the store, an engine, a file, a judge.

The raw bytes of stdout, stderr and of every file are searched. Markup of rich must not become a link either.
"""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from art_patch.cli import main, output
from art_patch.cli.commands.retrain import say_cycle
from art_patch.pipeline.cycle_run import CycleReport, write_report
from art_patch.store import open_store
from art_patch.types import AppReport, Score
from tests.support.servers import Answer, error, serving
from tests.support.store_samples import call, info

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\r[link=http://evil.example]x[/link][/red]"
RAW = re.compile(
    rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]|\xe2\x80[\x8b-\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]|\xed[\xa0-\xbf]|\xef\xbb\xbf"
)
"""What must not be printed, in UTF-8."""

Run = Callable[..., bytes]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[Run]:
    """Run a command in this process, which saves the imports, and return what it printed."""
    before = signal.getsignal(signal.SIGTERM)

    def run_it(*words: object) -> bytes:
        monkeypatch.setattr("sys.argv", ["art-patch", *map(str, words)])
        with suppress(SystemExit):
            main()
        out, err = capfdbinary.readouterr()
        assert b"Traceback" not in err, err.decode()
        return out + err

    yield run_it
    signal.signal(signal.SIGTERM, before)


def clean(output: bytes) -> bytes:
    found = RAW.search(output)
    assert found is None, output[max(0, found.start() - 200) : found.end() + 50]
    return output


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store in which every text that somebody else may have written is hostile."""
    monkeypatch.setenv("ART_PATCH_HOME", str(tmp_path))
    path = tmp_path / "default" / "store.db"
    store = open_store(f"sqlite:///{path}")
    now = time.time()
    facts: dict[str, Any] = dict.fromkeys(("recorded", "dropped", "fallbacks", "shadowed"), 1)
    facts |= {"mode": EVIL, "bypasses": {EVIL: 1}, "instrumented": [EVIL], "degraded": [EVIL]}
    store.write([info(), call("c1"), Score("s1", now, "reward", 1.0, "user", "t1"), AppReport(EVIL, now, facts)])
    store.ledger.add_base("agent@0", "/base", "ff", who="test")
    store.close()
    with closing(sqlite3.connect(path)) as raw, raw:
        for table, columns in {
            "calls": ("requested_model", "error", "fallback", "untrainable"),
            "trajectories": ("name", "user_id", "session_id", "scenario_key", "error"),
            "scores": ("name", "source", "comment"),
            "promotions": ("who", "reason"),
            "policies": ("base", "parent"),
        }.items():
            for column in columns:
                raw.execute(f"UPDATE {table} SET {column} = ?", (EVIL,))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "status", "history", "trajectories list", "trajectories show t1", "trajectories show t1 --full",
        "trajectories show --session \x1b", "groups", "days", "scenarios",
        "analytics", "report", "policies", "store stats", "store verify", "doctor", "diff x y", "promote agent@1",
        "reject agent@1 --reason x", "rollback", "mode record", "watch --once", "erase --user nobody --yes",
        "export {home}/out.jsonl --format trajectories", "send tensorboard {home}/board", "retrain",
    ],
)  # fmt: skip
def test_hostile_texts_in_the_store(home: Path, run: Run, command: str):
    for more in ([], ["--json"]):
        clean(run(*command.format(home=home).split(), *more))


@pytest.mark.parametrize("command", ["status", "doctor", "policies", "watch --once", "promote agent@0"])
def test_a_hostile_engine(home: Path, run: Run, command: str):
    with serving() as engine:
        engine.will(Answer(body=json.dumps({"object": "list", "data": [{"id": EVIL}, {"id": "agent@0"}]}).encode()))
        engine.always = error(500, EVIL)
        store = open_store(f"sqlite:///{home}/default/store.db")
        store.ledger.set_engine(f"{engine.url}", who="test")
        store.close()
        clean(run(*command.split()))


@pytest.mark.parametrize("row", [{EVIL: 1}, {"messages": [{"role": EVIL}]}, {"schema": EVIL}, EVIL])
def test_a_hostile_file(home: Path, run: Run, tmp_path: Path, row: Any):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    for command in (["import", file], ["feedback", "import", file], ["import", file, "--json"]):
        clean(run(*command))
    file.write_text(EVIL)
    clean(run("import", file))


class _Refusing(BaseHTTPRequestHandler):
    """Whatever it is asked, it answers that it is a teapot, in hostile words."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.dumps({"message": EVIL, "error": EVIL}).encode()
        self.send_response(418)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def tracker() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_hostile_tracker(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tracker: str):
    for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY", "LANGSMITH_API_KEY"):
        monkeypatch.setenv(name, "x")
    assert b"HTTP 418" in clean(run("feedback", "pull", "langfuse", "--base-url", tracker))
    clean(run("send", "langfuse", "--base-url", tracker))
    clean(run("send", "otlp", "--endpoint", tracker))


def test_progress_and_the_report_of_a_cycle(home: Path, capfdbinary: pytest.CaptureFixture[bytes]):
    with output.bars(quiet=False) as bars:
        bars("train", 1, 1, EVIL)
        bars.print(EVIL)
    report = CycleReport("failed", EVIL, EVIL, candidate=EVIL, metrics={"gate": {"reason": EVIL}})
    say_cycle(asdict(report))
    out, err = capfdbinary.readouterr()
    assert b"train" in err and b"failed" in out
    clean(out + err)
    path = write_report(report, home, who=EVIL, began_at=0.0, took_s=1.0)
    assert path is not None
    clean(path.read_bytes() + path.with_suffix(".md").read_bytes())


def test_the_end_of_a_stage_is_one_line(capfd: pytest.CaptureFixture[str]):
    """Where stderr is a file or a mail: a stage may go on to tell rows when all of its items were looked at."""
    with output.bars(quiet=False) as bars:
        for done, rows in ((250, 10), (500, 20), (500, 30), (500, 40)):
            bars("export", done, 500, f"{rows} rows")
        for _ in range(2):  # the next cycle's stage is told again
            bars("train", 0, 1)
            bars("train", 1, 1)
    assert capfd.readouterr().err.splitlines() == ["export: 500/500 20 rows", "train: 1/1", "train: 1/1"]


_APP = """
import logging, sys
from art_patch.cli import app
def bad(**_):
    logging.getLogger("art_patch.test").warning("the engine said: %s", sys.argv[1])
    raise ValueError(sys.argv[1])
app.app = bad
app.run_app()
"""


def test_the_log_and_the_traceback_of_a_mistake():
    done = subprocess.run([sys.executable, "-c", _APP, EVIL], capture_output=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith(b"the engine said: \\x1b]0;owned")
    assert b"ValueError: \\x1b]0;owned" in clean(done.stderr)
