"""Several processes make the policy that one makes; none of them is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import TrainingError
from art_patch.training.job import TrainJob, claim
from art_patch.training.launch import launch
from art_patch.training.running import run_job
from tests.training.jobs import base, make_job, one_thread, random_groups, row, weights_of

__all__ = ["base", "one_thread"]

pytestmark = pytest.mark.slow

ENDLESS = {"epochs": 5_000, "minibatches": 4, "learning_rate": 1e-9, "checkpoint_every_s": 0.0}


def processes_of(directory: Path) -> list[int]:
    """Every process that names the job directory, this one and zombies left out."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(directory) in words:
                found.append(int(entry.name))
    return sorted(found)


def require_none_left(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while processes_of(directory):
        assert time.monotonic() < deadline, processes_of(directory)
        time.sleep(0.1)


@pytest.fixture
def job(base: Path, tmp_path: Path) -> TrainJob:
    groups = random_groups(base, groups=4, siblings=3)
    return make_job(base, tmp_path / "adapters" / "agent@2", groups, processes=2, **ENDLESS)


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_make_the_policy_of_one(base: Path, tmp_path: Path, processes: int):
    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    groups = random_groups(base, groups=4, siblings=3)
    changes: dict[str, Any] = {"epochs": 2, "minibatches": 2, "learning_rate": 1e-3, "demonstrations": (shown,)}
    alone = make_job(base, tmp_path / "adapters" / "agent@1", groups, **changes)
    together = make_job(base, tmp_path / "adapters" / "agent@2", groups, processes=processes, **changes)
    said: list[tuple[int, int, str]] = []
    one = run_job(alone, tmp_path / "alone")
    many = run_job(together, tmp_path / "together", progress=lambda *at: said.append(at))
    first, second = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2))
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=0)
    assert [at[:2] for at in said] == [(done, 6) for done in range(7)]
    for mine, theirs in zip(one.history, many.history, strict=True):
        names = ("loss", "kl_nats", "entropy_nats", "grad_norm", "clip_fraction", "effective_share", "tokens")
        assert [theirs.get(name) for name in names] == pytest.approx([mine.get(name) for name in names], abs=1e-5)
    require_none_left(tmp_path / "together")


def test_an_error_of_theirs_is_ours(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=2)
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, processes=2, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"weight_norm inf at step 1 .*: the update was dropped"):
        run_job(job, tmp_path / "job")
    require_none_left(tmp_path / "job")
    assert not (tmp_path / "adapters").exists()


def test_one_that_dies_ends_all_with_an_error(job: TrainJob, tmp_path: Path):
    def kill_one(done: int, total: int, note: str) -> None:
        if done == 2:
            os.kill(max(processes_of(tmp_path / "job")), signal.SIGKILL)

    claim(tmp_path / "job", job)
    with pytest.raises(TrainingError, match=r"a training process ended with .*goes on from its last checkpoint"):
        launch(tmp_path / "job", 2, kill_one)
    require_none_left(tmp_path / "job")
    assert (tmp_path / "job" / "checkpoint.safetensors").exists()


@contextmanager
def launcher(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that launches the job, once the first step is made."""
    code = (
        "import sys; from pathlib import Path; from art_patch.training.launch import launch\n"
        "launch(Path(sys.argv[1]), 2, lambda done, total, note: print(done, flush=True))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "1":
                break
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_none_outlives_the_program_that_launched_them(job: TrainJob, tmp_path: Path, how: signal.Signals):
    claim(tmp_path / "job", job)
    with launcher(tmp_path / "job") as process:
        assert len(processes_of(tmp_path / "job")) == 4  # the program, torchrun, and its two
        process.send_signal(how)
        assert process.wait(60) != 0
        require_none_left(tmp_path / "job")
