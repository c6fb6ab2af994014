"""Files that others see whole or not at all, and that only their owner may read, whatever the umask."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_patch._lib.atomic_files import placing, replacing, write_whole
from art_patch.demo.processes import Process
from art_patch.errors import ConfigError
from art_patch.pipeline.cycle_run import CycleReport, write_report
from art_patch.rollouts.processes import ScriptChild
from art_patch.serving.vllm.process import VllmProcess
from art_patch.training.loop import job as job_files

END = [sys.executable, "-c", "pass"]


def a_cycles_report(directory: Path) -> None:
    (directory / "cycles").mkdir(mode=0o777)
    assert write_report(
        CycleReport("promoted", "better", None, None, {}), directory, who="me", began_at=1e9, took_s=1.0
    )


def an_updates_tokens(directory: Path) -> None:
    job_files.write_file(directory / "job.safetensors", b"token ids")


def what_a_child_says(directory: Path) -> None:
    ScriptChild("this", [], {}, directory / "child.log").stop()


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


def test_a_block_that_raises_leaves_the_file_as_it_was(tmp_path: Path):
    target = tmp_path / "a"
    target.write_text("before")
    with pytest.raises(RuntimeError), replacing(target) as file:
        file.write(b"after")
        raise RuntimeError
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_the_draft_of_a_killed_process_is_replaced(tmp_path: Path):
    target, draft = tmp_path / "a", tmp_path / "a.part"
    draft.write_text("half")
    with replacing(target, draft=draft) as file:
        file.write(b"whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [target]


def test_the_first_writer_wins_where_nothing_may_be_replaced(tmp_path: Path):
    write_whole(tmp_path / "below" / "key", "first", replace=False)
    write_whole(tmp_path / "below" / "key", "second", replace=False)
    assert (tmp_path / "below" / "key").read_text() == "first"
    write_whole(tmp_path / "below" / "key", "third")
    assert [path.read_text() for path in (tmp_path / "below").iterdir()] == ["third"]


def test_a_directory_appears_whole(tmp_path: Path):
    target = tmp_path / "a"
    with pytest.raises(RuntimeError), placing(target) as work:
        (work / "file").write_text("half")
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with placing(target, mode=0o755) as work:
        (work / "file").write_text("whole")
        assert not target.exists()
    assert [path.read_text() for path in target.iterdir()] == ["whole"]
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    with pytest.raises(ConfigError, match="exists already"), placing(target):
        pass
