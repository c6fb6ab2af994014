"""`policies fork`: another agent begins with a policy, in a project of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from art_patch.policies import MANIFEST, WEIGHTS, read_base_model, validate_adapter
from art_patch.store import open_store
from tests.benchmarks.families_start import logprobs_of, make_base, make_project
from tests.support.command_line import ENVIRONMENT, art_patch, says
from tests.support.tiny import make_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base")


def test_another_agent_begins_with_a_policy_and_its_evidence(base: Path, tmp_path: Path):
    adapter = make_project(tmp_path, base)
    done = art_patch("policies", "fork", "agent@1", "--as", "other", "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["policy"], told["project"], told["state"], told["loaded"]) == ("other@1", "other", "candidate", False)
    assert (told["evidence"]["policy"], told["evidence"]["state"]) == ("agent@1", "champion")
    copy = tmp_path / "other" / "adapters" / "other@1"
    assert torch.equal(logprobs_of(base, adapter), logprobs_of(base, copy))
    assert json.loads((copy / MANIFEST).read_text())["imported"]["evidence"]["policy"] == "agent@1"
    with closing(open_store(f"sqlite:///{tmp_path}/other/store.db", create=False)) as store:
        states = {policy.name: policy.state for policy in store.ledger.policies()}
        assert states == {"other@0": "champion", "other@1": "candidate"}
        assert store.verify() == []
    with closing(open_store(f"sqlite:///{tmp_path}/default/store.db", create=False)) as store:
        assert [one["to"] for one in store.transfers.copies_of(["agent@1"])] == [str(copy)]
    says(
        art_patch("promote", "other@1", "--project", "other", home=tmp_path), 14, "no test of this project has seen it"
    )
    # A second fork is the next step; the same agent may live in two projects.
    again = art_patch("policies", "fork", "agent@1", "--as", "other", home=tmp_path)
    assert "other@2 is a candidate in the project other, a copy of agent@1" in again.stdout
    there = art_patch("policies", "fork", "agent@1", "--as", "agent", "--into", "trial", "--json", home=tmp_path)
    assert json.loads(there.stdout)["policy"] == "agent@1"


def test_what_cannot_be_forked(base: Path, tmp_path: Path):
    make_project(tmp_path, base)

    def refused(code: int, words: str, *arguments: str) -> None:
        says(art_patch("policies", "fork", *arguments, home=tmp_path), code, words)

    refused(19, "there is no policy 'agent@9'", "agent@9", "--as", "other")
    refused(2, "is the base model itself", "agent@0", "--as", "other")
    refused(2, "is the policy's own project", "agent@1", "--as", "agent", "--into", "default")
    refused(11, "is not a policy name", "agent@1", "--as", "a/b", "--into", "other")
    assert not (tmp_path / "a").exists()
    # What fails makes no project.
    adapter = tmp_path / "default" / "adapters" / "agent@1"
    weights = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(weights[:-3])
    refused(11, "sha256 differs", "agent@1", "--as", "other")
    (adapter / WEIGHTS).write_bytes(weights)
    adapter.rename(tmp_path / "away")
    refused(19, "agent@1 was deleted: there is no", "agent@1", "--as", "other")
    (tmp_path / "away").rename(adapter)
    assert not (tmp_path / "other").exists()
    make_project(tmp_path / "elsewhere", make_tiny_model(tmp_path / "second", seed=3, hidden=32, vocab_size=320))
    (tmp_path / "elsewhere" / "default").rename(tmp_path / "third")
    refused(11, "another base", "agent@1", "--as", "agent", "--into", "third")
    refused(2, "the agent of that project is agent", "agent@1", "--as", "shop", "--into", "third")


def test_two_at_once_get_two_names_and_what_is_killed_is_never_a_policy(base: Path, tmp_path: Path):
    adapter = make_project(tmp_path, base)
    fork = [sys.executable, "-m", "art_patch", "policies", "fork", "agent@1", "--as", "other", "--home", str(tmp_path)]
    for kill_after_s in (0.3, 0.5, 0.7, 0.9, 1.1, None):
        both = [subprocess.Popen(fork, env=ENVIRONMENT, stdout=-3, stderr=-1, text=True) for _ in range(2)]
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            both[0].kill()
        for process in both:
            _, said = process.communicate(timeout=60)
            assert "Traceback" not in said
            assert process.returncode in ((0,) if kill_after_s is None else (0, -9)), said
    with closing(open_store(f"sqlite:///{tmp_path}/other/store.db", create=False)) as store:
        names = [policy.name for policy in store.ledger.policies()]
        assert store.verify() == []
        assert {policy.state for policy in store.ledger.policies() if policy.path} == {"candidate"}
    assert len(names) == len(set(names)) >= 3
    for name in names[1:]:
        copy = tmp_path / "other" / "adapters" / name
        assert (copy / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    validate = read_base_model(base)
    assert all(validate_adapter(tmp_path / "other" / "adapters", name, validate).probe is None for name in names[1:])
