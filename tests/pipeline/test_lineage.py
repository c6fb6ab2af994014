"""What is kept of a policy's origin: in its manifest, in the ledger, and what leaves the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from art_patch import __version__
from art_patch.demo.judge import STAND_IN_MODEL
from art_patch.policies import MANIFEST, data_digests, manifest_to_share
from art_patch.rewards import DEFAULT_RUBRIC, Judge
from tests.support.cycles import TRAINING, Place, rewarded_traffic


def test_a_manifest_says_how_its_policy_was_made_and_names_no_run(place: Place, judge: Judge):
    place.traffic()
    place.cycle(judge, TRAINING)
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None and policy.path is not None
    text = (Path(policy.path) / MANIFEST).read_text()
    manifest = json.loads(text)
    by = [{"judge": STAND_IN_MODEL, "rubric": DEFAULT_RUBRIC.version}]
    assert (manifest["art_patch"], manifest["parent"], manifest["judges"]) == (__version__, "agent@0", by)
    assert policy.created_at - manifest["made_at"] < 3600
    assert policy.metrics["made"] == {"art_patch": __version__, "judges": by}
    # Trackers and `policies show` read the settings of the update from here.
    assert policy.metrics["train"]["config"] == manifest["config"]
    assert manifest["config"]["seed"] == TRAINING.train.seed
    # The digests are those of the groups in the store, under the project's key.
    learned = place.store.read.groups_of(place.store.read.group_ids(state="trained"))
    key = (place.adapters.parent / "lineage.key").read_text().strip()
    of_groups = {group.id: [run.id for run in group.trajectories] for group in learned}
    assert set(manifest["data"]["groups"]) == set(data_digests(key, of_groups, ())["groups"])
    assert len(of_groups) > 1
    ids = [*of_groups, *(run for runs in of_groups.values() for run in runs)]
    assert not [each for each in ids if each in text]


def test_a_policy_of_rewards_from_users_has_no_judge(place: Place, judge: Judge):
    rewarded_traffic(place)
    place.cycle(judge, replace(TRAINING, train=replace(TRAINING.train, epochs=1)))
    policy = place.store.ledger.policy("agent@1")
    assert policy is not None
    assert policy.metrics["made"]["judges"] == []


def test_digests_tell_data_apart_and_say_nothing_without_the_key():
    groups = {"g1": ["a", "b"], "g2": ["c"]}
    one = data_digests("key", groups, ["d"])
    assert one == data_digests("key", {"g1": ["b", "a"], "g2": ["c"]}, ["d"])
    assert one["runs_alone"] == 1
    for other in (data_digests("other", groups, ["d"]), data_digests("key", {"g1": ["a"], "g2": ["c", "b"]}, ["e"])):
        assert not set(one["groups"]) & set(other["groups"])
        assert one["alone"] != other["alone"]
    # Where one id ends and the next begins counts, too.
    assert data_digests("k", {"g": ["a", "bc"]}, ())["groups"] != data_digests("k", {"g": ["ab", "c"]}, ())["groups"]
    assert data_digests("key", groups, ())["alone"] is None


def test_a_manifest_that_leaves_the_machine_has_no_digests(tmp_path: Path):
    path = tmp_path / MANIFEST
    path.write_text('{"base_sha256": "ff"}')
    assert manifest_to_share(path) == '{"base_sha256": "ff"}'
    path.write_text(
        '{"base_sha256": "ff", "data": {"groups": ["12"]}, "probe": {"token_ids": [1, 2]}, "parent": "agent@0"}'
    )
    assert json.loads(manifest_to_share(path)) == {"base_sha256": "ff", "parent": "agent@0"}
