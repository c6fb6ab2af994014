"""An update that is made again gives the same weights, and what is missing for that is named."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import Busy, NotFound
from art_patch.pipeline import TOLERANCE, Reproduction, forget_unfinished, project_lock, reproduce
from art_patch.policies import MANIFEST
from art_patch.rewards import Judge
from art_patch.training import LossConfig
from art_patch.types import Score
from tests.support.cycles import TRAINING, Place, reward, rewarded_traffic


def again(place: Place, name: str = "agent@1", **how: Any) -> Reproduction:
    return reproduce(place.store, place.adapters, name, progress=lambda done, total, note: None, **how)


def why_not(place: Place, name: str = "agent@1") -> dict[str, str]:
    found = again(place, name)
    assert (found.equal, found.largest_difference, found.took_s) == (None, None, 0.0)
    return dict(found.why_not)


def manifest_of(place: Place, name: str = "agent@1") -> dict[str, Any]:
    return json.loads((place.adapters / name / MANIFEST).read_text())


def rewrite(place: Place, **changes: Any) -> None:
    (place.adapters / "agent@1" / MANIFEST).write_text(json.dumps(manifest_of(place) | changes))


def learn(place: Place, judge: Judge, **train: Any) -> None:
    rewarded_traffic(place)
    report = place.cycle(judge, replace(TRAINING, train=replace(TRAINING.train, epochs=1, **train)))
    assert report.candidate == "agent@1", report


@pytest.mark.parametrize(
    "train",
    [
        {"lora_dropout": 0.1},
        {"anchor_weight": 0.5, "loss": LossConfig(kl_coefficient=0.1), "reference": "champion"},
        {"minibatches": 2, "lr_schedule": "cosine", "max_kl_nats": 0.01, "processes": 2},
    ],
)
def test_an_update_made_again_gives_the_same_weights(place: Place, judge: Judge, train: dict[str, Any]):
    learn(place, judge, **train)
    before = sorted(path.name for path in place.adapters.parent.rglob("*"))
    # Scores that come later change nothing: the advantages are those of then.
    groups = place.store.read.groups_of(place.store.read.group_ids(state="trained"))
    late = [Score(f"late-{run.id}", run.id, "reward", 0.0, "user", 2.0) for run in groups[0].trajectories]
    place.store.write(late)
    found = again(place)
    assert (found.equal, found.why_not, found.groups > 1, found.weights > 1000) == (True, {}, True, True)
    assert found.largest_difference is not None and found.largest_difference <= TOLERANCE
    assert sorted({path.name for path in place.adapters.parent.rglob("*")} - set(before)) == ["reproduction.lock"]
    assert [policy.name for policy in place.store.ledger.policies()] == ["agent@0", "agent@1"]


def test_a_second_update_starts_from_its_parent_again(place: Place, judge: Judge):
    learn(place, judge)
    rewarded_traffic(place, "agent@1", seed=1)
    place.cycle(judge, replace(TRAINING, train=replace(TRAINING.train, epochs=1)))
    assert place.champion == "agent@2"
    found = again(place, "agent@2")
    assert (found.equal, manifest_of(place, "agent@2")["parent"]) == (True, "agent@1")
    shutil.rmtree(place.adapters / "agent@1")
    assert list(why_not(place, "agent@2")) == ["files_of_parent"]
    assert list(why_not(place)) == ["files_of_own"]


def test_runs_that_were_too_far_are_left_out_again(place: Place, judge: Judge):
    learn(place, judge)
    place.traffic("agent@1", seed=1, siblings=3)
    place.traffic("agent@0", seed=2, siblings=3)  # of the same tasks, so they are siblings
    reward(place)
    config = replace(TRAINING.train, epochs=1, max_drift_nats=0.05)
    place.cycle(judge, replace(TRAINING, train=config))
    policy = place.store.ledger.policy("agent@2")
    assert policy is not None
    assert policy.metrics["train"]["far_rows"] > 0 and policy.metrics["train"]["trained_rows"] > 0
    found = again(place, "agent@2")
    assert (found.equal, found.why_not) == (True, {})


def test_what_was_erased_is_named_by_its_digest_and_nothing_of_it_stays(place: Place, judge: Judge):
    place.traffic(seed=3, user="eve@example.org", siblings=2)
    place.traffic(seed=4, siblings=4)
    runs = place.store.read.ungrouped(settled_before=100.0)
    place.store.write([Score(f"s{n}", run.id, "reward", n % 3 / 2, "user", 1.0) for n, run in enumerate(runs)])
    place.cycle(judge, replace(TRAINING, train=replace(TRAINING.train, epochs=1)))
    theirs = [run.id for run in runs if run.info.user_id is not None]
    manifest = manifest_of(place)
    named = {one[0] for group in manifest["data"]["update"]["groups"] for one in group["siblings"]}
    place.store.consent.withdraw("eve@example.org", who="test")
    found = again(place)
    assert list(found.why_not) == ["withdrawn"]
    withdrawn = found.runs_missing["withdrawn"]
    place.store.consent.give("eve@example.org", who="test")
    place.store.rights.erase(user="eve@example.org")
    found = again(place)
    assert list(found.why_not) == ["erased"]
    gone = found.runs_missing["erased"]
    assert gone == withdrawn and set(gone) <= named
    assert 0 < len(gone) <= len(theirs)
    assert f"{len(gone)} are erased" in found.why_not["erased"]
    files = [path for path in place.adapters.parent.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        assert not [each for each in ("eve@example.org", *theirs) if each.encode() in content], path


def test_what_is_not_as_it_was_is_named(place: Place, judge: Judge):
    learn(place, judge)
    with pytest.raises(NotFound, match="agent@7"):
        again(place, "agent@7")
    assert list(why_not(place, "agent@0")) == ["no_update"]
    whole = manifest_of(place)
    with project_lock(place.adapters.parent, "reproduction"), pytest.raises(Busy, match="another reproduction"):
        again(place)
    rewrite(place, made_with=whole["made_with"] | {"torch": "1.0", "device": "a GPU"}, art_patch="0.0.1")
    found = again(place)
    assert list(found.why_not) == ["made_with"]
    assert "torch 1.0 (here " in found.why_not["made_with"] and found.made_with["art_patch"][0] == "0.0.1"
    found = again(place, anyway=True)
    assert (found.equal, sorted(found.made_with)) == (True, ["art_patch", "device", "torch"])
    rewrite(place, **whole | {"config": whole["config"] | {"early_stop": 1, "eval_steps": 1}})
    assert list(why_not(place)) == ["early_stop"]
    rewrite(place, **whole | {"config": whole["config"] | {"of_another_release": 1}})
    assert "of_another_release" in why_not(place)["settings"]
    update = whole["data"]["update"]
    rewrite(place, **whole | {"data": whole["data"] | {"update": update | {"demonstrations": 3}}})
    assert "3 demonstrations" in why_not(place)["given"]
    rewrite(place, **whole | {"data": {"groups": []}})
    assert list(why_not(place)) == ["no_record"]
    rewrite(place, **whole)
    key = place.adapters.parent / "lineage.key"
    content = key.read_text()
    key.unlink()
    assert list(why_not(place)) == ["no_key"]
    key.write_text(content)
    key.chmod(0o600)
    run = place.store.read.groups_of(place.store.read.group_ids(state="trained"))[0].trajectories[0]
    place.store.write([replace(run.calls[0], id="late", started_at=time.time())])
    assert list(why_not(place)) == ["changed"]


def test_an_erasure_deletes_what_a_killed_reproduction_left(tmp_path: Path):
    left = tmp_path / "reproduction" / "training" / "agent@1" / "job.safetensors"
    left.parent.mkdir(parents=True)
    left.touch()
    with project_lock(tmp_path, "reproduction"):
        assert not forget_unfinished(tmp_path, [])
    assert left.exists()
    assert forget_unfinished(tmp_path, [])
    assert not (tmp_path / "reproduction").exists()


def test_a_damaged_base_is_named(place: Place, judge: Judge, base: Path):
    learn(place, judge)
    config = base / "config.json"
    content = config.read_text()
    try:
        config.write_text(content + "\n")
        assert "has the fingerprint" in why_not(place)["base"]
    finally:
        config.write_text(content)
