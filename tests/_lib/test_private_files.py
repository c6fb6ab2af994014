"""Files beside the store that quote it: what others may not read, whatever the umask and the directory."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_patch.demo.processes import Process
from art_patch.pipeline.report import CycleReport, keep
from art_patch.rollouts.processes import Child
from art_patch.serving.vllm.process import VllmProcess
from art_patch.training.loop import tensor_file

END = [sys.executable, "-c", "pass"]


def a_cycles_report(directory: Path) -> None:
    (directory / "cycles").mkdir(mode=0o777)
    assert keep(CycleReport("promoted", "better", None, None, {}), directory, who="me", began_at=1e9, took_s=1.0)


def an_updates_tokens(directory: Path) -> None:
    tensor_file.write(directory / "job.safetensors", b"token ids")


def what_a_child_says(directory: Path) -> None:
    Child("this", [], {}, directory / "child.log").stop()


def what_the_demos_agent_says(directory: Path) -> None:
    Process(END, {}, directory / "agent.log").stop()


def what_vllm_says(directory: Path) -> None:
    process = VllmProcess(END, dict(os.environ), log=directory / "vllm-0.log", home=directory)
    process.kill()


@pytest.fixture
def open_directory(tmp_path: Path) -> Iterator[Path]:
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


@pytest.mark.parametrize(
    "write", [a_cycles_report, an_updates_tokens, what_a_child_says, what_the_demos_agent_says, what_vllm_says]
)
def test_only_the_owner_reads(write: Callable[[Path], None], open_directory: Path):
    write(open_directory)
    files = [path for path in open_directory.rglob("*") if path.is_file()]
    assert files
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
        path.name: "0o600" for path in files
    }
