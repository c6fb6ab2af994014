"""Training as it meets the store: killed cycles are gone on with, and what is no longer so is begun anew."""

from __future__ import annotations

import shutil
import sqlite3
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import AdapterRejected, ConfigError, EngineError, TrainingError
from art_patch.pipeline import run_explicit_update
from art_patch.rewards import Judge
from art_patch.serving import EmbeddedEngine, EngineClient, EngineLimits
from art_patch.serving.contract import EngineRefused
from art_patch.store import open_store
from art_patch.training import TrainJob, read_job, run_job
from art_patch.training.loop import update as publishing
from art_patch.training.loop.update import probe_of
from art_patch.types import Group, Score, TrajectoryInfo, Usage
from tests.support.cycles import (
    CONFIG,
    RESAMPLING,
    TRAINING,
    Place,
    die_after,
    eager,
    jobs,
    rewarded_traffic,
    trained_on,
    upstream_traffic,
)
from tests.support.engines import ADMIN_KEY, serve
from tests.support.families import REFUSED


def used(place: Place) -> Usage:
    with closing(open_store(place.url, create=False)) as store:
        return store.reports.usage(since=0.0, until=time.time() + 1)


def kept_rows(place: Place) -> set[tuple[Any, ...]]:
    """The rows that the store says `agent@1` was trained on."""
    with closing(sqlite3.connect(place.url.removeprefix("sqlite:///"))) as raw:
        columns = "policy, group_id, trajectory_id, call_id, choice, advantage, weight, project_id, agent_id"
        return set(raw.execute(f"SELECT {columns} FROM trained_rows"))


def expected_rows(job: TrainJob, place: Place) -> set[tuple[Any, ...]]:
    """Every trainable call of the job's siblings, with the advantage of its run; each has one choice here."""
    siblings = {each.trajectory_id: (group.id, each) for group in job.groups for each in group.siblings}
    rows = {
        ("agent@1", siblings[run.id][0], run.id, call.id, 0, siblings[run.id][1].example.advantage, 1.0, 1, 1)
        for run in place.store.read.trajectories(list(siblings))
        for call in run.calls
        if call.untrainable is None
    }
    assert rows and {row[5] > 0 for row in rows} == {True, False}
    return rows


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
    assert (report.metrics["train"]["resumed"], report.metrics["train"]["steps"]) == (True, 8)
    assert report.metrics["train"]["logprob_gap_nats"] < 1e-4
    assert trained_on(place) == set(job.group_ids)
    assert place.store.read.groups(state="scored")  # those of the second traffic wait
    assert jobs(place) == []
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    assert len(policy.metrics["train"]["history"]) == 8
    assert kept_rows(place) == expected_rows(job, place)
    spent = used(place)
    assert (spent.updates, spent.updates_lost) == (1, 0)
    assert spent.update_s > report.metrics["train"]["took_s"]  # and what was interrupted


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
    assert (report.outcome, report.metrics["train"]["steps"]) == ("promoted", 4)
    assert "resumed" not in report.metrics["train"]
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
    assert "resumed" not in report.metrics["train"]
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
    assert "resumed" not in report.metrics["train"]
    assert report.metrics["train"]["trajectories"] < len(job.trajectory_ids)
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
    assert spent.update_s > report.metrics["train"]["took_s"] > 0  # that of both


def test_a_new_lora_is_begun_from_the_base(place: Place, judge: Judge):
    rewarded_traffic(place)
    place.cycle(judge, TRAINING)
    rewarded_traffic(place, "agent@1", seed=1)
    anew = replace(TRAINING, train=replace(TRAINING.train, start="base", max_kl_nats=None))
    report = place.cycle(judge, anew)
    assert (report.outcome, report.candidate) == ("promoted", "agent@2")
    assert report.metrics["train"]["logprob_gap_nats"] is None  # the base sampled none of it
    assert place.store.ledger.policy("agent@2").parent == "agent@1"  # type: ignore[union-attr]


def test_groups_of_a_policy_that_turns_out_to_be_far_are_stale_and_not_trained(place: Place, judge: Judge):
    rewarded_traffic(place)
    for n, run in enumerate(place.store.read.ungrouped(settled_before=100.0)[:20]):
        (call,), copy = run.calls, f"{run.id}-far"
        moved = tuple(each - 3.0 for each in call.choices[0].logprobs or ())
        far = replace(call, id=copy, trajectory_id=copy, choices=(replace(call.choices[0], logprobs=moved),))
        place.store.rights.erase(trajectory=run.id)
        place.store.write([TrajectoryInfo(copy, 1.0), far, Score(copy, copy, "reward", n % 2, "user", 1.0)])
    near = replace(TRAINING, train=replace(TRAINING.train, max_drift_nats=0.5, max_gap_nats=None))
    report = place.cycle(judge, near)
    assert report.metrics["train"]["far_rows"] > 0
    rows = kept_rows(place)
    assert rows and not any(row[2].endswith("-far") for row in rows)
    stale = place.store.read.groups(state="stale")
    assert stale and not {group.id for group in stale} & {row[1] for row in rows}
    for group in place.store.read.groups(state="trained"):
        assert any(row[1] == group.id for row in rows)


def test_upstreams_good_answers_are_imitated_and_told_from_bad_ones(place: Place, judge: Judge):
    upstream_traffic(place)
    config = replace(
        RESAMPLING,
        train=replace(TRAINING.train, imitate_from=0.5, imitate_models=("*",), prefer_from=0.05, max_kl_nats=None),
    )
    report = place.cycle(judge, config)
    assert report.outcome == "promoted", report
    train = report.metrics["train"]
    groups = len(trained_on(place))
    assert groups > 3
    assert train["demonstrations"] == groups  # "four" is short, and so judged to be good
    assert 0 < train["pairs"] <= groups
    history = train["history"]
    assert [step["phase"] for step in history] == ["imitate"] * 8 + ["prefer"] * 8 + ["groups"] * 8
    assert history[7]["loss"] < history[0]["loss"] / 2


@pytest.mark.parametrize("kind", REFUSED)
def test_a_base_whose_lora_would_be_refused_is_said_before_the_judge_is_paid(
    tmp_path: Path, base: Path, judge: Judge, kind: str
):
    make, words = REFUSED[kind]
    make().save_pretrained(tmp_path / "sees")
    for file in base.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "sees")
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters")) as running:
        place = Place(tmp_path, tmp_path / "sees", running.client)  # in the ledger; who answers does not matter here
        place.traffic(siblings=2)
        with pytest.raises(ConfigError, match=words):
            place.cycle(judge)
        assert place.stages == []
        assert place.store.read.ungrouped(settled_before=100.0)
        place.store.close()


@pytest.mark.parametrize("why", ["rank", "numbers"])
def test_a_candidate_that_the_engine_refuses_is_rejected_and_its_groups_are_trained_on_again(
    tmp_path: Path, base: Path, judge: Judge, why: str, monkeypatch: pytest.MonkeyPatch
):
    limits = EngineLimits(max_lora_rank=2 if why == "rank" else 16)
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters", limits=limits)) as running:
        place = Place(tmp_path, base, running.client)
        rewarded_traffic(place)
        if why == "numbers":  # the trainer noted others than the engine computes, as of another precision
            monkeypatch.setattr(publishing, "probe_of", wrong_canary)
        report = place.cycle(judge, TRAINING)
        monkeypatch.undo()
        words = {"rank": "this engine serves ranks 1 to 2", "numbers": "agent@1: the engine"}[why]
        assert (report.outcome, report.champion, report.candidate) == ("rejected", "agent@0", "agent@1")
        assert report.reason.startswith("the engine refuses it: ") and words in report.reason
        assert "gate" not in report.metrics
        assert place.states() == {"agent@0": "champion", "agent@1": "rejected"}
        assert [move["reason"] for move in place.store.ledger.history(limit=1)] == [report.reason]
        assert (trained_on(place), jobs(place), place.client.models()) == (set(), [], ["agent@0"])
        waiting = set(place.store.read.group_ids(state="scored"))

        place.stages.clear()
        fits = replace(TRAINING, train=replace(TRAINING.train, lora_rank=2))
        report = place.cycle(judge, fits)
        assert (report.outcome, report.candidate) == ("promoted", "agent@2")
        assert ("train" in place.stages, "resumed" in report.metrics["train"]) == (True, False)
        assert trained_on(place) == waiting
        assert place.store.verify() == []
        place.store.close()


def wrong_canary(*given: Any) -> Any:
    right = probe_of(*given)
    return replace(right, logprobs=tuple(value - 1.0 for value in right.logprobs))


def test_what_the_engine_refuses_of_a_policy_trained_by_hand_is_rejected_too(tmp_path: Path, base: Path):
    limits = EngineLimits(max_lora_rank=2)
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=tmp_path / "adapters", limits=limits)) as running:
        place = Place(tmp_path, base, running.client)
        rewarded_traffic(place)
        runs = place.store.read.ungrouped(settled_before=100.0)
        place.store.ledger.add_groups([Group("g", "task:g", "same_task", runs)], state="scored")
        with pytest.raises(AdapterRejected, match="ranks 1 to 2"):
            run_explicit_update(
                place.store, place.client, place.adapters, TRAINING.train, ["g"],
                who="test", progress=lambda stage, done, total, note="": None,
            )  # fmt: skip
        assert place.states() == {"agent@0": "champion", "agent@1": "rejected"}
        assert place.store.read.group_ids(state="scored") == ("g",)
        place.store.close()


@pytest.mark.parametrize("why", ["down", "overloaded", "loaded meanwhile"])
def test_a_candidate_that_the_engine_cannot_load_now_is_gated_by_the_next_cycle(place: Place, judge: Judge, why: str):
    rewarded_traffic(place)
    right = place.client
    place.client = Busy(right, why)
    if why == "loaded meanwhile":
        assert place.cycle(judge, TRAINING).outcome == "promoted"
        return
    with pytest.raises(EngineError, match=why):
        place.cycle(judge, TRAINING)
    assert place.states() == {"agent@0": "champion", "agent@1": "candidate"}
    assert trained_on(place)
    place.stages.clear()
    place.client = right
    report = place.cycle(judge, TRAINING)
    assert (report.outcome, report.candidate, "train" in place.stages) == ("promoted", "agent@1", False)


def test_a_candidate_whose_files_have_not_reached_the_engine_waits_for_them(tmp_path: Path, base: Path, judge: Judge):
    there = tmp_path / "of the engine"
    with serve(EmbeddedEngine.from_pretrained(base, adapters_root=there)) as running:
        place = Place(tmp_path, base, running.client)
        rewarded_traffic(place)
        with pytest.raises(AdapterRejected, match="no directory"):
            place.cycle(judge, TRAINING)
        assert place.states() == {"agent@0": "champion", "agent@1": "candidate"}
        shutil.copytree(place.adapters / "agent@1", there / "agent@1")
        assert place.cycle(judge, TRAINING).outcome == "promoted"
        place.store.close()


class Busy(EngineClient):
    """A client whose engine loads nothing now, or has just loaded it for somebody else."""

    def __init__(self, right: EngineClient, why: str) -> None:
        super().__init__(right.base_url, admin_key=ADMIN_KEY)
        self._why = why

    def load(self, name: str) -> None:
        """Loads a policy."""
        if self._why == "overloaded":
            raise EngineRefused("overloaded", 503)
        if self._why == "down":
            raise EngineError("down")
        super().load(name)
        super().load(name)


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
