"""The demo as a newcomer runs it: it learns, loses nothing, goes on where it stopped, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from art_patch.demo.processes import Program, agent_source, unpatched
from art_patch.store import open_store
from tests.support.demo_models import demo_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

whole = pytest.mark.skipif("ART_PATCH_FULL" not in os.environ, reason="takes minutes; ART_PATCH_FULL=1 runs it")

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("ART_PATCH_")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the demo's model in it, so that each run starts at once."""
    directory = tmp_path_factory.mktemp("home")
    (directory / "models").symlink_to(demo_models(tmp_path_factory))
    return directory


def command(home: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "art_patch", "demo", "--seed", "1", "--home", str(home), *options]


def run(home: Path, *options: str) -> dict[str, Any]:
    result = subprocess.run(
        command(home, *options, "--json"), capture_output=True, text=True, timeout=900, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def processes_of(home: Path) -> list[str]:
    """Command lines of every process that works in `home`."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(home) in line:
                found.append(line)
    return found


def test_it_learns_and_a_second_run_goes_on(home: Path):
    first = run(home, "--cycles", "1")
    assert (first["failed_calls"], first["cycles"], first["resumed"]) == (0, 1, False)
    assert first["app_rss_added_mib"] <= 64
    second = run(home, "--cycles", "1")
    assert (second["resumed"], second["cycles"], second["failed_calls"]) == (True, 2, 0)
    assert second["curve"][:2] == first["curve"]
    assert second["success_before"] == first["success_before"]
    assert second["success_after"] - second["success_before"] >= 0.25
    assert second["promotions"] >= 1
    assert int(second["policy"].split("@")[1]) >= int(first["policy"].split("@")[1])
    assert processes_of(home) == []

    # With the engine gone one can still go back; the next start serves the older policy.
    place = ["--project", "demo-1", "--home", str(home), "--json"]
    shown = subprocess.run(
        [sys.executable, "-m", "art_patch", "rollback", *place],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    assert int(json.loads(shown.stdout)["champion"].split("@")[1]) < int(second["policy"].split("@")[1])


@whole
def test_with_the_rewards_shuffled_nothing_is_learned(home: Path):
    metrics = run(home, "--cycles", "2", "--control")
    assert metrics["promotions"] == 2  # the control's gate lets everything pass, or it would show nothing
    assert metrics["success_after"] - metrics["success_before"] <= 0.10


@whole
def test_what_is_asked_once_is_learned_from_by_asking_the_model_again(home: Path):
    metrics = run(home, "--cycles", "1", "--single-shot")
    assert metrics["success_after"] - metrics["success_before"] >= 0.15
    assert (list(metrics["groups_by_way"]), metrics["tools_run_by_job"]) == (["resampled"], 0)


@pytest.fixture(scope="module")
def often_interrupted(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of its own; each run in it goes on from what the one before left."""
    directory = tmp_path_factory.mktemp("interrupted")
    (directory / "models").symlink_to(home / "models")
    return directory


MOMENTS = ["serves at", "train:", *(pytest.param(m, marks=whole) for m in ("measure:", "score:", "gate: answers:"))]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_leaves_nothing_behind_and_loses_nothing(often_interrupted: Path, moment: str):
    with subprocess.Popen(
        command(often_interrupted), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as demo:
        assert demo.stdout is not None
        said = ""
        for line in demo.stdout:
            said += line
            if moment in line:
                break
        demo.send_signal(signal.SIGINT)
        said += demo.stdout.read()
        assert demo.wait(timeout=60) == 130, said
    assert "Traceback" not in said
    assert "run it again to go on" in said
    assert processes_of(often_interrupted) == []
    store = open_store(f"sqlite:///{often_interrupted}/demo-1/store.db", create=False)
    assert store.verify() == []
    assert store.ledger.route().base_url is None
    store.close()


def test_a_killed_demo_takes_its_children_along(home: Path, tmp_path: Path):
    (tmp_path / "models").symlink_to(home / "models")
    with subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if "serves at" in line)
        demo.kill()
    for _ in range(300):
        if not processes_of(tmp_path):
            break
        time.sleep(0.1)
    assert processes_of(tmp_path) == []


def test_the_agent_is_the_same_without_its_two_lines():
    with_us, without = agent_source().splitlines(), unpatched(Program(agent_source())).source.splitlines()
    assert [line for line in with_us if line not in without] == ["import art_patch as art", "art.patch()"]
    assert not any("art_patch" in line or "art." in line for line in without if not line.startswith("Nothing here"))
