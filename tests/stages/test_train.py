"""Training as it meets the store: killed cycles are gone on with, and what is no longer so is begun anew."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from art_patch.cycle import CycleConfig, retrain
from art_patch.errors import ConfigError, TrainingError
from art_patch.ids import new_id
from art_patch.records import Score
from art_patch.records.usage import Usage
from art_patch.rewards.judge import Judge
from art_patch.store.connect import open_database
from art_patch.store.usage import usage
from art_patch.training.job import read_job
from art_patch.training.running import run_job
from tests.stages.test_resample import RESAMPLING, upstream_traffic
from tests.test_cycle import CONFIG, Place, base, eager, judge, place

__all__ = ["base", "judge", "place"]

TRAINING = replace(eager(CONFIG), train=replace(CONFIG.train, checkpoint_every_s=0.0))


class Dies(Exception):
    """Stands for kill -9."""


def rewarded_traffic(place: Place, policy: str = "agent@0", *, seed: int = 0) -> None:
    """Runs that users rewarded, so that no judge is asked."""
    place.traffic(policy, seed=seed)
    reward(place)


def reward(place: Place) -> None:
    runs = place.store.read.ungrouped(settled_before=100.0)
    place.store.write([Score(new_id(), run.id, "reward", n % 3 / 2, "user", 1.0) for n, run in enumerate(runs)])


def die_after(place: Place, judge: Judge, steps: int, config: CycleConfig = TRAINING) -> None:
    def die(stage: str, done: int, total: int, note: str = "") -> None:
        if stage == "train" and done == steps:
            raise Dies

    with pytest.raises(Dies):
        retrain(place.store, place.client, judge, place.adapters, config, who="test", progress=die, now=100.0)


def jobs(place: Place) -> list[Path]:
    directory = place.adapters.parent / "training"
    return sorted(directory.iterdir()) if directory.exists() else []


def used(place: Place) -> Usage:
    database = open_database(place.url, create=False)
    try:
        return usage(database, since=0.0, until=time.time() + 1)
    finally:
        database.close()


def trained_on(place: Place) -> set[str]:
    return set(place.store.read.group_ids(state="trained"))


@pytest.mark.parametrize("steps", [0, 3, 8])
def test_an_update_that_was_killed_is_gone_on_with_and_keeps_its_groups(place: Place, judge: Judge, steps: int):
    rewarded_traffic(place)
    die_after(place, judge, steps)
    (directory,) = jobs(place)
    job = read_job(directory)
    assert job is not None
    assert place.champion == "agent@0"
    rewarded_traffic(place, seed=1)
    report = place.cycle(judge, TRAINING)
    assert (report.outcome, report.candidate) == ("promoted", "agent@1")
    assert (report.figures["train"]["resumed"], report.figures["train"]["steps"]) == (True, 8)
    assert report.figures["train"]["logprob_gap_nats"] < 1e-4
    assert trained_on(place) == set(job.group_ids)
    assert place.store.read.groups(state="scored")  # those of the second traffic wait
    assert jobs(place) == []
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    assert len(policy.figures["train"]["history"]) == 8
    spent = used(place)
    assert (spent.updates, spent.updates_lost) == (1, 0)
    assert spent.update_s > report.figures["train"]["took_s"]  # and what was interrupted


def test_one_that_was_published_and_is_not_in_the_ledger_is_not_made_again(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 8)
    (directory,) = jobs(place)
    job = read_job(directory)
    assert job is not None
    run_job(job, directory)
    weights = (place.adapters / "agent@1" / "adapter_model.safetensors").read_bytes()
    report = place.cycle(judge, TRAINING)
    assert (report.outcome, report.candidate) == ("promoted", "agent@1")
    assert (place.adapters / "agent@1" / "adapter_model.safetensors").read_bytes() == weights
    assert "train" not in place.stages


def test_with_another_config_it_is_begun_anew(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 3)
    other = replace(TRAINING, train=replace(TRAINING.train, epochs=1))
    report = place.cycle(judge, other)
    assert (report.outcome, report.figures["train"]["steps"]) == ("promoted", 4)
    assert "resumed" not in report.figures["train"]
    assert jobs(place) == []


def test_that_of_another_champion_is_deleted(place: Place, judge: Judge, tmp_path: Path):
    rewarded_traffic(place)
    die_after(place, judge, 3)
    (directory,) = jobs(place)
    shutil.copytree(directory, tmp_path / "kept")
    assert place.cycle(judge, TRAINING).champion == "agent@1"
    shutil.copytree(tmp_path / "kept", directory)
    rewarded_traffic(place, "agent@1", seed=1)
    report = place.cycle(judge, TRAINING)
    assert (report.outcome, report.candidate) == ("promoted", "agent@2")
    assert "resumed" not in report.figures["train"]
    assert jobs(place) == []


def test_runs_that_were_erased_meanwhile_are_not_learned_from(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 3)
    (directory,) = jobs(place)
    job = read_job(directory)
    assert job is not None
    gone = min(job.trajectory_ids)
    place.store.rights.erase(trajectory=gone)
    report = place.cycle(judge, TRAINING)
    assert report.outcome == "promoted"
    assert "resumed" not in report.figures["train"]
    assert report.figures["train"]["trajectories"] < len(job.trajectory_ids)
    assert jobs(place) == []


def test_a_job_that_cannot_be_read_is_begun_anew(place: Place, judge: Judge):
    rewarded_traffic(place)
    die_after(place, judge, 3)
    (directory,) = jobs(place)
    (directory / "job.safetensors").write_bytes(b"damaged")
    assert place.cycle(judge, TRAINING).outcome == "promoted"
    assert jobs(place) == []


def test_an_update_that_diverges_leaves_no_job_and_its_groups_waiting(place: Place, judge: Judge):
    rewarded_traffic(place)
    wild = replace(TRAINING, train=replace(TRAINING.train, learning_rate=1e30))
    with pytest.raises(TrainingError, match="dropped"):
        place.cycle(judge, wild)
    assert (jobs(place), list(place.adapters.glob("*"))) == ([], [])
    assert place.store.read.groups(state="scored")
    report = place.cycle(judge, TRAINING)
    assert report.outcome == "promoted"
    spent = used(place)
    assert (spent.updates, spent.updates_lost, spent.updates_untimed) == (1, 1, 0)
    assert spent.update_s > report.figures["train"]["took_s"] > 0  # that of both


def test_a_new_lora_is_begun_from_the_base(place: Place, judge: Judge):
    rewarded_traffic(place)
    place.cycle(judge, TRAINING)
    rewarded_traffic(place, "agent@1", seed=1)
    anew = replace(TRAINING, train=replace(TRAINING.train, start="base", max_kl_nats=None))
    report = place.cycle(judge, anew)
    assert (report.outcome, report.candidate) == ("promoted", "agent@2")
    assert report.figures["train"]["logprob_gap_nats"] is None  # the base sampled none of it
    assert place.store.ledger.policy("agent@2").parent == "agent@1"  # type: ignore[union-attr]


def test_upstreams_good_answers_are_imitated_and_told_from_bad_ones(place: Place, judge: Judge):
    upstream_traffic(place)
    config = replace(RESAMPLING, train=replace(TRAINING.train, imitate_from=0.5, prefer_from=0.05, max_kl_nats=None))
    report = place.cycle(judge, config)
    assert report.outcome == "promoted", report
    train = report.figures["train"]
    groups = len(trained_on(place))
    assert groups > 3
    assert train["demonstrations"] == groups  # "four" is short, and so judged to be good
    assert 0 < train["pairs"] <= groups
    history = train["history"]
    assert [step["phase"] for step in history] == ["imitate"] * 8 + ["prefer"] * 8 + ["groups"] * 8
    assert history[7]["loss"] < history[0]["loss"] / 2


def test_what_cannot_be_trained_here_is_said_before_the_judge_is_paid(
    place: Place, judge: Judge, monkeypatch: pytest.MonkeyPatch
):
    place.traffic()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "peft", None)
        with pytest.raises(ConfigError, match=r'an update needs peft, not installed here; run: .*"art-patch\[train\]"'):
            place.cycle(judge)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="there is no CUDA GPU"):
            place.cycle(judge, replace(CONFIG, train=replace(CONFIG.train, backend="unsloth")))
    assert place.stages == []
    assert place.store.read.ungrouped(settled_before=100.0)
    assert place.cycle(judge, eager()).outcome == "promoted"
