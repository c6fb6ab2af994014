"""The command line as a user meets it: real processes, one clear line for each mistake, its own exit code."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from openai import OpenAI

from art_patch._lib.ids import new_id
from art_patch.pipeline import project_lock
from art_patch.store import open_store, read_route
from art_patch.types import AppReport, Call, Choice, TrajectoryInfo
from tests.support.command_line import ENVIRONMENT, Serving, art_patch, says
from tests.support.tiny import make_tiny_model


@pytest.fixture
def serving(base: Path, tmp_path: Path) -> Iterator[Serving]:
    server = Serving(base, tmp_path)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def served_home(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of a server that runs as long as these tests do."""
    home = tmp_path_factory.mktemp("served")
    server = Serving(base, home)
    yield home
    assert server.stop() == (0, "")


@pytest.fixture
def served(served_home: Path, tmp_path: Path) -> Path:
    """A home as that server made it, of the test's own: the same champion, at the same address."""
    store = open_store(f"sqlite:///{served_home}/default/store.db")
    (tmp_path / "default").mkdir()
    store.maintain.backup(tmp_path / "default" / "store.db")
    store.close()
    shutil.copy2(served_home / "default" / "admin.key", tmp_path / "default")
    return tmp_path


@pytest.fixture
def ended(served: Path) -> Path:
    """A home as a server leaves it that was stopped in order."""
    store = open_store(f"sqlite:///{served}/default/store.db")
    store.ledger.set_engine(None, who="test")
    store.close()
    return served


def record_a_call(home: Path) -> None:
    store = open_store(f"sqlite:///{home}/default/store.db")
    answer = Choice(0, {"role": "assistant", "content": "yo"}, "stop", (1,), (-0.5,))
    call = Call(new_id(), "t", time.time(), "m", ({"role": "user", "content": "hi"},), (answer,), policy="agent@0")
    store.write([TrajectoryInfo("t", time.time()), call])
    store.close()


COMMANDS = (
    "run", "proxy", "serve", "retrain", "status", "doctor", "mode", "promote", "rollback", "policies", "history",
    "diff", "demo", "trajectories", "export", "import",
)  # fmt: skip
HELP = """
import json, os, sys
from art_patch.cli import main

for command in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        sys.argv[1:] = [command, "--help"]
        main()
    print(json.dumps([command, os.waitstatus_to_exitcode(os.wait()[1])]))
"""
"""The command line is imported once, and each command has a process."""


def test_help_and_version(tmp_path: Path):
    shown = art_patch("--help", home=tmp_path)
    assert shown.returncode == 0
    for command in COMMANDS:
        assert command in shown.stdout
    run = [sys.executable, "-c", HELP, *COMMANDS]
    helped = subprocess.run(run, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=True).stdout
    assert [json.loads(line) for line in helped.splitlines() if line.startswith("[")] == [[c, 0] for c in COMMANDS]
    for command in COMMANDS:
        assert f"{command} [OPTIONS]" in helped
    assert art_patch("--version", home=tmp_path).stdout.strip() == "0.1.0"


def test_an_unknown_model_is_named(tmp_path: Path):
    says(art_patch("serve", "--base", "/no/such/model", home=tmp_path), 9, "/no/such/model", "Hugging Face id")
    says(
        art_patch("serve", "--base", "nobody/nothing", home=tmp_path, HF_HUB_OFFLINE="1"),
        9,
        "nobody/nothing",
        "could not",
    )


def test_a_port_in_use_is_named(base: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        says(art_patch("serve", "--base", base, "--port", port, home=tmp_path), 10, port, "another port")


def test_an_open_address_without_a_key_is_refused(base: Path, tmp_path: Path):
    says(art_patch("serve", "--base", base, "--host", "0.0.0.0", home=tmp_path), 2, "key file")
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o644)
    says(art_patch("serve", "--base", base, "--api-key-file", key, home=tmp_path), 2, "chmod 600")


def test_an_unwritable_database_is_named(base: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    store = f"sqlite:///{tmp_path}/file/store.db"
    says(
        art_patch("serve", "--base", base, "--store", store, home=tmp_path), 8, str(tmp_path / "file"), "owner and mode"
    )


def test_a_corrupt_database_is_named_and_left_as_it_is(tmp_path: Path):
    broken = tmp_path / "store.db"
    broken.write_bytes(b"SQLite format 3\0" + b"\xff" * 5_000)
    says(art_patch("status", "--store", f"sqlite:///{broken}", home=tmp_path), 8, str(broken))
    assert broken.read_bytes() == b"SQLite format 3\0" + b"\xff" * 5_000


def test_a_missing_store_is_named(tmp_path: Path):
    says(art_patch("status", home=tmp_path), 19, "there is no store", "art_patch.patch()")
    says(art_patch("rollback", home=tmp_path), 19, "there is no store")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["status", "--store", "mysql://x"], "sqlite:////"),
        (["status", "--project", "../up"], "ART_PATCH_PROJECT"),
        (["mode", "sideways"], "off, record, shadow, canary, route, auto"),
        (["mode", "route", "--percent", "10"], "canary only"),
        (["retrain", "--judge", "x", "--judge-base-url", "nowhere"], "http"),
    ],
)
def test_impossible_settings_are_named(arguments: list[str], word: str, tmp_path: Path):
    says(art_patch(*arguments, home=tmp_path), 2, word)


@pytest.mark.parametrize(
    ("arguments", "mode", "percent"),
    [
        (["shadow"], "shadow", None),
        (["canary", "--percent", "12.5"], "canary", 12.5),
        (["canary"], "canary", None),
        (["record"], "record", None),
        (["off"], "off", None),
        (["auto"], None, None),
    ],
)
def test_modes_reach_running_apps(arguments: list[str], mode: str | None, percent: float | None, tmp_path: Path):
    open_store(f"sqlite:///{tmp_path}/default/store.db").close()
    art_patch("mode", "canary", "--percent", "50", home=tmp_path)  # what was set before is gone altogether
    result = art_patch("mode", *arguments, "--json", home=tmp_path)
    said = {"project": "default", "mode": arguments[0], "canary_percent": percent, "control_percent": 0, "apps": 0}
    assert json.loads(result.stdout) == said | {"dry_run": False}
    route = read_route(f"sqlite:///{tmp_path}/default/store.db")
    assert (route.mode, route.canary_percent) == (mode, percent)


def test_a_dry_run_of_a_mode_changes_nothing(tmp_path: Path):
    with closing(open_store(url := f"sqlite:///{tmp_path}/default/store.db")) as store:
        store.ledger.set_mode("record", who="test")
    would = art_patch("mode", "off", "--control", "7", "--dry-run", home=tmp_path)
    assert (would.returncode, would.stdout) == (
        0,
        "dry run, nothing is changed: mode of default: off; 7 % of the sessions stay with upstream; "
        "no app process runs at present\n",
    )
    assert (read_route(url).mode, read_route(url).control_percent) == ("record", 0.0)
    says(art_patch("mode", "of", "--dry-run", home=tmp_path), 2, "not one of")


def test_modes_are_shown(tmp_path: Path):
    store = open_store(f"sqlite:///{tmp_path}/default/store.db")
    said = art_patch("mode", "canary", "--percent", "12.5", home=tmp_path).stdout
    assert said == "mode of default: canary with 12.5 % of the sessions; no app process runs at present\n"
    store.write([AppReport("web:1", time.time(), {}), AppReport("web:2", time.time() - 7_200, {})])
    assert art_patch("mode", "off", home=tmp_path).stdout.endswith("; 1 app process follows within 0.5 s\n")
    store.close()
    art_patch("mode", "canary", "--percent", "12.5", home=tmp_path)
    assert "canary, 12.5 % of the sessions" in art_patch("status", home=tmp_path).stdout
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["canary_percent"] == 12.5
    assert art_patch("mode", "shadow", home=tmp_path).stdout.startswith(
        "mode of default: shadow; 1 app process follows"
    )


def test_a_control_group_is_set_and_shown(tmp_path: Path):
    open_store(f"sqlite:///{tmp_path}/default/store.db").close()
    says(art_patch("mode", home=tmp_path), 2, "give a mode", "--control PERCENT")
    art_patch("mode", "route", home=tmp_path)
    said = art_patch("mode", "--control", "5", home=tmp_path).stdout
    assert said.startswith("mode of default: route; 5 % of the sessions stay with upstream; no app process runs")
    route = read_route(f"sqlite:///{tmp_path}/default/store.db")
    assert (route.mode, route.control_percent) == ("route", 5)
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["control_percent"] == 5
    assert json.loads(art_patch("mode", "--control", "0", "--json", home=tmp_path).stdout)["control_percent"] == 0
    art_patch("mode", "--control", "5", home=tmp_path)
    # All sessions are upstream's then.
    said = art_patch("mode", "record", home=tmp_path).stdout
    assert said == "mode of default: record; no app process runs at present\n"
    for percent in ("-1", "51"):
        assert art_patch("mode", "--control", percent, home=tmp_path).returncode == 2


@pytest.mark.parametrize("percent", ["-1", "101", "half"])
def test_a_share_is_a_percentage(percent: str, tmp_path: Path):
    result = art_patch("mode", "canary", "--percent", percent, home=tmp_path)
    assert result.returncode == 2
    assert "--percent" in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_empty_store_is_nothing_to_do(served: Path):
    for _ in range(2):
        result = art_patch("retrain", "--json", home=served)
        assert result.returncode == 0
        assert json.loads(result.stdout)["outcome"] == "nothing to do"
    assert "no calls are recorded" in art_patch("retrain", home=served).stdout


def test_no_judge_is_said_and_nothing_lost(served: Path):
    record_a_call(served)
    says(art_patch("retrain", home=served), 7, "ART_PATCH_JUDGE", "openai/")
    assert json.loads(art_patch("status", "--json", home=served).stdout)["recorded"]["calls"] == 1


def test_no_engine_is_said(ended: Path):
    record_a_call(ended)
    says(art_patch("retrain", "--judge", "openai/x", home=ended), 6, "art-patch serve")
    says(art_patch("promote", "agent@0", home=ended), 14, "already champion")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_a_machine_that_cannot_train_as_asked_is_said_before_anything_is_paid(served: Path):
    record_a_call(served)
    says(art_patch("retrain", "--judge", "openai/x", "--backend", "unsloth", home=served), 2, "CUDA", "backend='peft'")


def test_a_second_cycle_is_told_that_one_runs(served: Path):
    record_a_call(served)
    with project_lock(served / "default"):
        says(art_patch("retrain", "--judge", "openai/x", home=served), 5, "another cycle")


def test_errors_as_json(tmp_path: Path):
    result = art_patch("status", "--json", home=tmp_path)
    assert result.returncode == 19
    assert json.loads(result.stdout) == {
        "error": "NotFound",
        "message": f"there is no store at {tmp_path}/default/store.db; run your agent with art_patch.patch() first",
        "exit_code": 19,
    }


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reject agent@9", "Missing option '--reason'. (see `art-patch reject --help`)"),
        ("diff a", "Missing argument 'b'. (see `art-patch diff --help`)"),
        (
            "trajectories list --min-reward good",
            "Invalid value for '--min-reward': Input should be a valid number, unable to parse string as a number "
            "(see `art-patch trajectories list --help`)",
        ),
        ("statsu", "No such command 'statsu'. Did you mean 'status'? (see `art-patch --help`)"),
        ("status --no-such-option", "No such option: --no-such-option (see `art-patch status --help`)"),
    ],
)
def test_usage_errors_as_json(command: str, message: str, tmp_path: Path):
    result = art_patch(*command.split(), "--json", home=tmp_path)
    assert (result.returncode, result.stderr) == (2, "")
    assert json.loads(result.stdout) == {"error": "ConfigError", "message": message, "exit_code": 2}


def test_what_is_shown_and_ends_is_no_error_with_json(tmp_path: Path):
    shown = art_patch("status", "--json", "--help", home=tmp_path)
    assert (shown.returncode, "Usage:" in shown.stdout, shown.stderr) == (0, True, "")


def test_serve_publishes_where_it_answers_and_takes_it_back(tmp_path: Path, serving: Serving):
    assert serving.ready["champion"] == "agent@0"
    status = json.loads(art_patch("status", "--json", home=tmp_path).stdout)
    assert status["engine"] == {"base_url": serving.ready["base_url"], "healthy": True, "models": ["agent@0"]}
    with OpenAI(base_url=serving.ready["base_url"], api_key="none") as client:
        answer = client.chat.completions.create(
            model="agent@0", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4
        )
    assert answer.model == "agent@0"
    assert serving.stop() == (0, "")
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["engine"]["base_url"] is None


def test_ctrl_c_stops_the_server_in_order(tmp_path: Path, serving: Serving):
    code, stderr = serving.stop(signal.SIGINT)
    assert code == 130
    assert stderr == "art-patch: interrupted; what was recorded and published is kept, run it again to go on\n"
    assert json.loads(art_patch("status", "--json", home=tmp_path).stdout)["engine"]["base_url"] is None


@pytest.mark.slow
def test_a_killed_server_is_seen_as_unreachable(tmp_path: Path, serving: Serving):
    serving.stop(signal.SIGKILL)
    shown = art_patch("status", home=tmp_path)
    assert shown.returncode == 0
    assert "not reachable" in shown.stdout
    record_a_call(tmp_path)
    says(art_patch("retrain", "--judge", "openai/x", home=tmp_path), 6, "art-patch serve")


def test_another_base_is_refused_for_the_same_project(ended: Path):
    other = make_tiny_model(ended / "other", seed=5, hidden=32, vocab_size=320)
    says(art_patch("serve", "--base", other, "--port", "0", home=ended), 2, "agent@0 was trained on", "--project")
    says(art_patch("serve", "--base", other, "--name", "bob", "--port", "0", home=ended), 2, "--name agent")


def test_a_project_whose_champion_was_retired_keeps_its_base_and_says_how_it_serves_again(ended: Path):
    record_a_call(ended)
    store = open_store(f"sqlite:///{ended}/default/store.db")
    store.ledger.move("agent@0", "retired", who="test", reason="worse than upstream")
    store.close()
    other = make_tiny_model(ended / "other", seed=5, hidden=32, vocab_size=320)
    says(art_patch("serve", "--base", other, "--port", "0", home=ended), 2, "agent@0 was trained on", "--project")
    said = art_patch("retrain", home=ended).stdout
    assert "upstream answers since the champion was retired" in said and "art-patch promote" in said


def test_status_reads_well(served: Path):
    record_a_call(served)
    shown = art_patch("status", home=served).stdout
    for words in ("champion      agent@0", "healthy", "1 (1 by our policies, 0 fell back", "first policy served"):
        assert words in shown
