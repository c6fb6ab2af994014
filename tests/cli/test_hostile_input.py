"""Arguments that no store takes, and answers that no JSON parser does: one clear line, and no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer

from art_patch.cli.app import run_app
from art_patch.cli.commands.serve import advertised
from art_patch.errors import ConfigError
from art_patch.store import open_store
from art_patch.types import AppReport, Policy
from tests.support.command_line import ENVIRONMENT, art_patch, says
from tests.support.run_samples import fill

NO_TEXT = os.fsdecode(b"\xffa")  # as Python keeps it in `sys.argv`


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db")) as store:
        store.ledger.add_base("agent@0", "tiny", "0" * 64, who="test")
        fill(store)
        gate = {"candidate": 0.5, "champion": 0.5, "lower_bound": float("-inf")}
        policy = Policy("agent@9", "tiny", "0" * 64, "candidate", 1.0, None, "agent@0", {"gate": gate})
        store.ledger.add_candidate(policy, trained_on=[], who="test")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ("trajectories", "list", "--user", NO_TEXT), ("trajectories", "list", "--error", NO_TEXT),
        ("trajectories", "show", NO_TEXT), ("trajectories", "show", "--session", NO_TEXT), ("groups", "show", NO_TEXT),
        ("erase", "--user", NO_TEXT, "--dry-run"), ("reproduce", NO_TEXT), ("rollback", "--to", NO_TEXT),
    ],
)  # fmt: skip
def test_an_argument_that_is_no_text_is_refused(home: Path, command: tuple[str, ...]):
    says(art_patch(*command, home=home), 2, "is not text in UTF-8")
    done = art_patch(*command, "--json", home=home)
    assert json.loads(done.stdout)["exit_code"] == 2


def test_an_answer_is_json_whatever_numbers_are_on_record(home: Path):
    for command in (("policies", "show", "agent@9"), ("policies",)):
        done = art_patch(*command, "--json", home=home)
        assert "lower_bound" in done.stdout
        json.loads(done.stdout, parse_constant=int)


def test_ctrl_c_inside_the_import_of_a_library_has_the_same_exit_code(tmp_path: Path):
    """CPython notes a Ctrl-C inside of `exec`, as dataclasses use it, and would end the process by SIGINT."""
    code = """
from art_patch.cli import output
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    raise SystemExit(output.interrupted())
"""
    (tmp_path / "interrupted_program.py").write_text(code)
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "interrupted_program"]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 130


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_before_a_command_begins_is_no_traceback(tmp_path: Path, options: list[str], by: signal.Signals):
    os.mkfifo(tmp_path / "env")
    command = [sys.executable, "-m", "art_patch", "--env-file", tmp_path / "env", "status", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with (tmp_path / "env").open("w"):  # once it reads
        process.send_signal(by)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert error.startswith("art-patch: interrupted; ") and "Traceback" not in error


def test_typer_gives_up_while_it_reads_the_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stopped(**_: object) -> None:
        raise typer.Abort

    monkeypatch.setattr(sys, "argv", ["art-patch", "status", "--json"])
    monkeypatch.setattr("art_patch.cli.app.app", stopped)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            run_app()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("art-patch: interrupted; ")


def test_an_address_of_ipv6_stands_in_brackets_and_one_of_ipv4_may():
    assert advertised("http://[fd00::1]:8700") == ("http://[fd00::1]:8700", "fd00::1")
    assert advertised("http://[10.0.0.1]:8700") == ("http://10.0.0.1:8700", "10.0.0.1")
    assert advertised("https://gpu1.internal/v1") == ("https://gpu1.internal/v1", "gpu1.internal")
    for wrong in (
        "http://fd00::1:8700",
        "http://[fd00::1",
        "http://[10.0.0.1]:x",
        "gpu1:8700",
        "ftp://gpu1",
        "http://",
    ):
        with pytest.raises(ConfigError, match="is not an address"):
            advertised(wrong)


def test_what_an_app_says_wrongly_costs_nobody_a_look(home: Path):
    now = time.time()
    odd: list[Any] = [
        [1], {}, {"mode": ["x"], "recorded": "9", "at": "x", "id": [1]}, {"instrumented": 3, "degraded": [3, None]},
        {"bypasses": {"a": None, "b": 2}, "instrumented": [1, "x"]}, {"champion": [1], "challenger_percent": {}},
    ]  # fmt: skip
    with closing(open_store(f"sqlite:///{home}/default/store.db")) as store:
        store.write([AppReport(f"odd:{number}", now, facts) for number, facts in enumerate(odd)])
        store.write([AppReport("ours:1", now, {"recorded": 7, "mode": "route", "instrumented": ["openai 1.2"]})])
    for command in (("status",), ("status", "--json"), ("status", "--prometheus"), ("mode", "route", "--dry-run")):
        done = art_patch(*command, home=home)
        assert done.returncode == 0, done.stderr
        assert "ours:1" in done.stdout or command[0] == "mode"


def test_a_report_that_somebody_edited_is_no_report(home: Path):
    whole: Any = {"outcome": "promoted", "began_at": 1.0}
    reports: list[Any] = [
        whole | {"reason": "fine"},
        [1],
        {"outcome": "x"},
        whole | {"began_at": "x"},
        whole | {"began_at": 1e300},
    ]
    damaged: list[tuple[dict[str, Any], str]] = [
        ({"metrics": [1]}, "metrics"), ({"metrics": {"judge": {"cost_usd": "x"}}}, "judge cost_usd"),
        ({"stages_s": [1]}, "stages_s"), ({"stages_s": {"train": "x"}}, "stages_s train"), ({"took_s": "x"}, "took_s"),
        ({"took_s": 10**400}, "took_s"), ({"candidate": ["agent@1"], "who": 5}, "candidate, who"),
    ]  # fmt: skip
    (home / "default" / "cycles").mkdir()
    for number, report in enumerate(reports):
        (home / "default" / "cycles" / f"2026-{number:02}.json").write_text(json.dumps(report))
    done = art_patch("cycles", "--json", home=home)
    assert [each["id"] for each in json.loads(done.stdout)["cycles"]] == ["2026-00"]
    assert "2026-00  promoted" in art_patch("cycles", home=home).stdout
    for number in range(1, len(reports)):
        says(art_patch("cycles", "show", f"2026-{number:02}", home=home), 19, "is gone or cannot be read")
    for number, (damage, unread) in enumerate(damaged):
        (home / "default" / "cycles" / f"2027-{number:02}.json").write_text(json.dumps(whole | damage))
        shown = art_patch("cycles", "show", f"2027-{number:02}", home=home)
        assert (shown.returncode, f"could not be read: {unread} " in shown.stdout) == (0, True), shown.stdout


@pytest.mark.parametrize(
    "arguments", [("serve", "--port", "0", "--base"), ("doctor", "--gpu-memory", "24", "--base"), ("import",)]
)
def test_a_path_that_is_too_long_is_told(tmp_path: Path, arguments: tuple[str, ...]):
    done = art_patch(*arguments, "x" * 5_000, home=tmp_path)
    assert (done.returncode, "File name too long" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
