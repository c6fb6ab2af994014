"""Killed at any moment, an update goes on and makes the policy that it would have made."""

from __future__ import annotations

import multiprocessing
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import TrainingError
from art_patch.policies import BaseModel, read_base_model, validate_adapter
from art_patch.training import TrainGroup, TrainJob
from art_patch.training.loop import job as job_files
from art_patch.training.loop.update import read_train_state, update
from tests.support.train_jobs import make_job, random_groups, row, weights_of

FORTY_STEPS = {"epochs": 10, "minibatches": 4, "learning_rate": 1e-3, "warmup_steps": 5, "checkpoint_every_s": 0.0}

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["art_patch.training.loop.update", "transformers.models.qwen3.modeling_qwen3", "peft"]
)


@pytest.fixture(scope="module")
def groups(base: Path) -> tuple[TrainGroup, ...]:
    return random_groups(base, groups=4, siblings=3)


def make_policy(job: TrainJob, directory: Path) -> None:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    update(job, directory)


def outlived(job: TrainJob, directory: Path, *, kill_after_s: float | None) -> bool:
    """Whether the update was done before it was killed."""
    process = _processes.Process(target=make_policy, args=(job, directory))
    process.start()
    process.join(kill_after_s)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == 0


def require_only_whole_policies(adapters: Path, base: BaseModel) -> None:
    for directory in adapters.glob("[!.]*") if adapters.exists() else ():
        validate_adapter(adapters, directory.name, base)


def kill_again_and_again(base: Path, directory: Path, groups: tuple[TrainGroup, ...], *, kills: int, seed: int) -> None:
    print(f"seed {seed}")
    rng, model = random.Random(seed), read_base_model(base)
    adapters = directory / "adapters"
    undisturbed = make_job(base, adapters / "agent@1", groups, **FORTY_STEPS)
    assert outlived(undisturbed, directory / "warm", kill_after_s=None)  # and the next one knows what it imports
    began = time.monotonic()
    whole = make_job(base, adapters / "agent@2", groups, **FORTY_STEPS)
    assert outlived(whole, directory / "whole", kill_after_s=None)
    took_s = time.monotonic() - began
    expected = weights_of(adapters / "agent@2")
    killed, step = 0, 3
    while killed < kills:
        job = make_job(base, adapters / f"agent@{step}", groups, **FORTY_STEPS)
        while not outlived(
            job, directory / f"{step}", kill_after_s=rng.uniform(0, took_s / 2) if killed < kills else None
        ):
            killed += 1
            require_only_whole_policies(adapters, model)
        found = weights_of(adapters / f"agent@{step}")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        step += 1
    require_only_whole_policies(adapters, model)


def test_an_update_that_is_killed_five_times_gives_the_same_weights(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    kill_again_and_again(base, tmp_path, groups, kills=5, seed=random.randrange(10**6))


@pytest.mark.full
def test_an_update_that_is_killed_25_times_gives_the_same_weights(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    kill_again_and_again(base, tmp_path, groups, kills=25, seed=random.randrange(10**6))


class Dies(Exception):
    """Stands for a kill right after a step."""


@pytest.mark.parametrize(("after", "dropout"), [(0, 0.0), (1, 0.0), (3, 0.0), (3, 0.3), (4, 0.0), (7, 0.0)])
def test_phases_go_on_where_they_stopped(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, after: int, dropout: float
):
    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    changes: dict[str, Any] = {"epochs": 2, "minibatches": 3, "checkpoint_every_s": 0.0, "demonstrations": (shown,)}
    changes |= {"rehearse_from": 0.5, "rehearsal": tuple(row((9, n), (n, 41), logprob=0.0) for n in range(20))}
    changes["lora_dropout"] = dropout

    def die(done: int, total: int, note: str) -> None:
        assert total == 8
        if done == after:
            raise Dies

    one = make_job(base, tmp_path / "adapters" / "agent@1", groups, **changes)
    whole = update(one, tmp_path / "whole")
    two = make_job(base, tmp_path / "adapters" / "agent@2", groups, **changes)
    with pytest.raises(Dies):
        update(two, tmp_path / "died", progress=die)
    resumed = update(two, tmp_path / "died")
    first, second = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    timeless = [
        [{k: v for k, v in step.items() if k not in ("seconds", "tokens_per_s")} for step in metrics.history]
        for metrics in (whole, resumed)
    ]
    assert timeless[0] == timeless[1]
    assert resumed.logprob_gap_nats == whole.logprob_gap_nats


def test_checkpoints_are_written_when_it_is_time_and_when_a_phase_ends(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    checkpoint, seen = tmp_path / "job" / "checkpoint.safetensors", [False]

    def look(done: int, total: int, note: str) -> None:
        seen.append(checkpoint.exists())

    shown = row((9, 10), (40, 41, 42), logprob=0.0)
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, demonstrations=(shown,), epochs=2, minibatches=2)
    update(job, tmp_path / "job", progress=look)
    assert seen == [False, False, False, True, True, True, True, True]  # at step 2 of 6


@pytest.mark.parametrize(("save_steps", "after", "kept"), [(1, 5, 5), (3, 2, 0), (3, 5, 3), (3, 6, 6), (None, 5, 0)])
def test_a_kill_loses_less_than_save_steps(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, save_steps: int | None, after: int, kept: int
):
    job = make_job(
        base, tmp_path / "adapters" / "agent@1", groups,
        epochs=2, minibatches=4, save_steps=save_steps, checkpoint_every_s=1e6,
    )  # fmt: skip

    def die(done: int, total: int, note: str) -> None:
        if done == after:
            raise Dies

    with pytest.raises(Dies):
        update(job, tmp_path / "job", progress=die)
    assert read_train_state(tmp_path / "job")[0].done == kept


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_an_error_that_says_so_and_costs_no_checkpoint(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, **FORTY_STEPS)
    directory = tmp_path / "job"
    with files_of_at_most(10_000), pytest.raises(TrainingError, match=r"checkpoint.* could not be written .*Make room"):
        update(job, directory)
    assert sorted(path.name for path in directory.iterdir()) == ["job.safetensors", "start.safetensors"]

    def die(done: int, total: int, note: str) -> None:
        if done == 3:
            raise Dies

    with pytest.raises(Dies):
        update(job, directory, progress=die)
    before = (directory / "checkpoint.safetensors").read_bytes()
    with files_of_at_most(10_000), pytest.raises(TrainingError, match="could not be written"):
        update(job, directory)
    assert (directory / "checkpoint.safetensors").read_bytes() == before
    assert not list(directory.glob(".*"))
    update(job, directory)
    other = make_job(base, tmp_path / "adapters" / "agent@2", groups, **FORTY_STEPS)
    update(other, tmp_path / "other")
    first, second = (weights_of(tmp_path / "adapters" / f"agent@{step}") for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_directory_that_cannot_be_written_is_an_error_that_says_so(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path
):
    (tmp_path / "file").write_text("not a directory")
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups)
    with pytest.raises(TrainingError, match=r"could not be written \(.*\)"):
        update(job, tmp_path / "file" / "job")


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0notjson!", b"x" * 100])
def test_a_damaged_checkpoint_is_an_error_that_says_what_to_delete(
    base: Path, groups: tuple[TrainGroup, ...], tmp_path: Path, damage: bytes
):
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups)
    directory = tmp_path / "job"
    directory.mkdir()
    (directory / "checkpoint.safetensors").write_bytes(damage)
    with pytest.raises(TrainingError, match=rf"delete {directory}"):
        update(job, directory)


def test_a_tensor_file_is_the_same_bytes_for_the_same_content(tmp_path: Path):
    arrays = {name: torch.arange(n).numpy() for n, name in enumerate("bca")}
    facts = {"x": [1, {"y": None}], "a": "ü"}
    content = job_files.file_content(arrays, facts)
    assert content == job_files.file_content(dict(reversed(arrays.items())), dict(reversed(facts.items())))
    job_files.write_file(tmp_path / "f", content)
    found = job_files.read_file(tmp_path / "f")
    assert found is not None
    assert found[1] == facts
    assert {name: array.tolist() for name, array in found[0].items()} == {"b": [], "c": [0], "a": [0, 1]}
    assert job_files.read_file(tmp_path / "g") is None
