"""`art-patch reproduce` in processes of its own: equal weights, and each exit code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from art_patch.policies import MANIFEST, WEIGHTS
from tests.benchmarks.operate_reproduce import again, train
from tests.support.command_line import art_patch, says
from tests.support.tiny import make_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of two policies, each trained on rewarded runs."""
    home = tmp_path_factory.mktemp("home")
    base = make_tiny_model(home / "base", hidden=32, vocab_size=320)
    assert train(home / "default", base, 1) == ["agent@1", "agent@2"]
    return home


def test_two_policies_are_equal_in_new_processes(home: Path):
    for name in ("agent@1", "agent@2"):
        told = again(home, name)
        assert (told["policy"], told["equal"], told["why_not"]) == (name, True, {})
        assert told["largest_difference"] <= told["tolerance"] == 1e-6
    assert not (home / "default" / "reproduction").exists()


def test_it_reads_well_in_80_columns(home: Path):
    shown = art_patch("reproduce", "agent@1", home=home, COLUMNS="80")
    assert (shown.returncode, max(map(len, shown.stdout.splitlines())) <= 80) == (0, True)
    flat = " ".join(shown.stdout.split())
    for words in ("agent@1 was made again in", "the weights are equal", "it learned from", "1e-06 counts as equal"):
        assert words in flat


def test_weights_that_differ_and_what_cannot_be_made_have_codes_of_their_own(home: Path):
    says(art_patch("reproduce", "agent@7", home=home), 19, "agent@7", "art-patch policies")
    shown = art_patch("reproduce", "agent@0", home=home)
    assert (shown.returncode, "cannot be made again" in shown.stdout) == (20, True)
    # As if another one had been published: the manifest is written for what lies there.
    directory = home / "default" / "adapters" / "agent@2"
    weights = load_file(directory / WEIGHTS)
    name = next(iter(weights))
    weights[name][0, 0] += 1e-3
    save_file(weights, directory / WEIGHTS)
    told = json.loads(art_patch("reproduce", "agent@2", "--json", home=home).stdout)
    assert (told["equal"], list(told["why_not"])) == (None, ["files_of_own"])
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["files"][WEIGHTS] = hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(manifest))
    shown = art_patch("reproduce", "agent@2", home=home)
    assert (shown.returncode, "not equal" in shown.stdout, "is 0.001" in shown.stdout) == (21, True, True)
