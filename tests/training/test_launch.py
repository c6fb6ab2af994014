"""Several processes make the policy that one makes; none of them is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import TrainingError
from art_patch.training import TrainJob, run_job
from art_patch.training.loop.job import claim
from art_patch.training.loop.processes import launch
from tests.support.train_jobs import make_job, random_groups, row, weights_of

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


def require_same_weights(adapters: Path) -> None:
    first, second = (weights_of(adapters / f"agent@{step}") for step in (1, 2))
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=0)


@pytest.fixture
def job(base: Path, tmp_path: Path) -> TrainJob:
    groups = random_groups(base, groups=4, siblings=3)
    return make_job(base, tmp_path / "adapters" / "agent@2", groups, processes=2, **ENDLESS)


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_several_processes_make_the_policy_of_one(base: Path, tmp_path: Path, processes: int):
    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    groups = random_groups(base, groups=4, siblings=3)
    changes: dict[str, Any] = {"epochs": 2, "minibatches": 2, "learning_rate": 1e-3, "demonstrations": (shown,)}
    changes |= {"evaluation": random_groups(base, groups=2, siblings=3, seed=1), "eval_steps": 4}
    alone = make_job(base, tmp_path / "adapters" / "agent@1", groups, **changes)
    together = make_job(base, tmp_path / "adapters" / "agent@2", groups, processes=processes, **changes)
    said: list[tuple[int, int, str]] = []
    one = run_job(alone, tmp_path / "alone")
    many = run_job(together, tmp_path / "together", progress=lambda done, total, note: said.append((done, total, note)))
    require_same_weights(tmp_path / "adapters")
    assert [at[:2] for at in said] == [(done, 6) for done in range(7)]
    for mine, theirs in zip(one.history, many.history, strict=True):
        names = (
            "loss", "kl_nats", "entropy_nats", "grad_norm", "clip_fraction", "effective_share", "tokens",
            "eval_loss", "eval_kl_nats", "eval_gain_nats",
        )  # fmt: skip
        assert [theirs.get(name) for name in names] == pytest.approx([mine.get(name) for name in names], abs=1e-5)
    require_none_left(tmp_path / "together")


def test_an_error_of_theirs_is_ours(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=2)
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, processes=2, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"weight_norm inf at step 1 .*: the update was dropped"):
        run_job(job, tmp_path / "job")
    require_none_left(tmp_path / "job")
    assert not (tmp_path / "adapters").exists()


@pytest.mark.parametrize("which", [min, max])
def test_one_that_dies_ends_all_with_an_error_and_its_last_words(
    job: TrainJob, tmp_path: Path, which: Callable[[list[int]], int], monkeypatch: pytest.MonkeyPatch
):
    def kill_one(done: int, total: int, note: str) -> None:
        if done == 2:
            os.kill(which(processes_of(tmp_path / "job")), signal.SIGABRT)

    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    claim(tmp_path / "job", job)
    told = r"(?s)a training process ended with -6; .*goes on from its last checkpoint.*\n  File .*__main__\.py"
    with pytest.raises(TrainingError, match=told):
        launch(tmp_path / "job", 2, kill_one)
    require_none_left(tmp_path / "job")
    assert (tmp_path / "job" / "checkpoint.safetensors").exists()
    assert not list((tmp_path / "job").glob("rendezvous-*"))


def test_torchrun_by_hand_makes_the_same_policy(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=3)
    alone = make_job(base, tmp_path / "adapters" / "agent@1", groups, learning_rate=1e-3)
    by_hand = make_job(base, tmp_path / "adapters" / "agent@2", groups, learning_rate=1e-3, processes=2)
    run_job(alone, tmp_path / "alone")
    claim(tmp_path / "by_hand", by_hand)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "art_patch.training", str(tmp_path / "by_hand")]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    require_same_weights(tmp_path / "adapters")


@contextmanager
def launcher(directory: Path) -> Generator[subprocess.Popen[str]]:
    """A program that launches the job, once the first step is made."""
    code = (
        "import sys; from pathlib import Path; from art_patch.training.loop.processes import launch\n"
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


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM, signal.SIGKILL])
def test_none_outlives_the_program_that_launched_them(job: TrainJob, tmp_path: Path, how: signal.Signals):
    claim(tmp_path / "job", job)
    with launcher(tmp_path / "job") as process:
        assert len(processes_of(tmp_path / "job")) == 3  # the program and its two
        process.send_signal(how)
        assert process.wait(60) != 0
        require_none_left(tmp_path / "job")


def listening(processes: list[int]) -> set[str]:
    """The addresses on which they listen."""
    links = [os.readlink(link) for pid in processes for link in Path(f"/proc/{pid}/fd").iterdir()]
    found: set[str] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                words = bytes.fromhex(local.split(":")[0])
                packed = struct.pack(f">{len(words) // 4}I", *struct.unpack(f"={len(words) // 4}I", words))
                found.add(socket.inet_ntop(family, packed))
    return found


def test_nothing_of_an_update_listens_beyond_loopback(job: TrainJob, tmp_path: Path):
    claim(tmp_path / "job", job)
    with launcher(tmp_path / "job"):
        assert listening(processes_of(tmp_path / "job")) == {"127.0.0.1"}
