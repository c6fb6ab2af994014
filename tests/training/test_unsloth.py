"""Unsloth's own environment: how it is found, and that an update runs there with this very art_patch.

Unsloth itself needs a GPU (`tests/gpu/test_unsloth.py`). A stand-in for it here loads the model by transformers and
peft on the CPU, in an environment of its own, which borrows all else from the tests' environment.
"""

from __future__ import annotations

import json
import os
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from art_patch.errors import ConfigError
from art_patch.policies import MANIFEST, read_json
from art_patch.settings import load_settings
from art_patch.training import TrainConfig, made_with, require_machine, run_job, unsloth_recipe, why_no_unsloth
from art_patch.training.loop.unsloth import unsloth_python
from tests.support.command_line import art_patch
from tests.support.train_jobs import make_job, random_groups, weights_of

STAND_IN = """
import sys

assert "transformers" not in sys.modules, "Unsloth must be imported first: it changes transformers"


class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name, dtype, **_):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype), None

    @staticmethod
    def get_peft_model(model, *, r, lora_alpha, target_modules, lora_dropout, bias, random_state, **_):
        import torch
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(random_state)
        lora = LoraConfig(
            r=r, lora_alpha=lora_alpha, target_modules=target_modules, lora_dropout=lora_dropout, bias=bias,
            task_type="CAUSAL_LM",
        )
        return get_peft_model(model, lora).eval()
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where environments are looked for, on a machine that has a GPU, as it seems."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return load_settings().environments


@pytest.fixture
def stand_in(root: Path) -> Path:
    """The interpreter of a complete environment with the stand-in, and without art_patch."""
    home = unsloth_recipe().home(root)
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "unsloth.py").write_text(STAND_IN)
    (site / "unsloth-1.2.3.dist-info").mkdir()
    (site / "unsloth-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: unsloth\nVersion: 1.2.3\n")
    # Python does not read the `.pth` files of a directory that it borrows, so our source tree is not found there.
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    (home / "art-patch.json").write_text("{}")
    return home / "bin" / "python"


def test_it_is_found_where_init_builds_it(root: Path, monkeypatch: pytest.MonkeyPatch):
    config = TrainConfig(backend="unsloth")
    with pytest.raises(ConfigError, match="it is not installed; run `art-patch init unsloth`, or take backend='peft'"):
        require_machine(config)
    unsloth_recipe().home(root).mkdir(parents=True)  # half built
    with pytest.raises(ConfigError, match="it is not installed"):
        unsloth_python()
    (unsloth_recipe().home(root) / "art-patch.json").write_text("{}")
    assert unsloth_python() == unsloth_recipe().python(root) == unsloth_recipe().home(root) / "bin" / "python"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="there is no CUDA GPU; take backend='peft'"):
        require_machine(config)


@pytest.mark.slow
def test_an_update_runs_in_that_environment(
    base: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A package of that name there must not be taken for ours, nor must what the user's variables and directory lead to.
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "art_patch").mkdir(parents=True)
    (elsewhere / "art_patch" / "__init__.py").write_text("raise SystemExit('the wrong art_patch')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(elsewhere), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.chdir(elsewhere)
    groups = random_groups(base, groups=2, siblings=3)
    here = make_job(base, tmp_path / "adapters" / "agent@1", groups, dtype="float32", gradient_checkpointing=False)
    target = tmp_path / "adapters" / "agent@2"
    there = replace(here, target=target, config=replace(here.config, backend="unsloth"))
    said: list[int] = []
    run_job(here, tmp_path / "here")
    metrics = run_job(there, tmp_path / "there", progress=lambda done, total, note: said.append(done))
    assert metrics.steps == 1 and said == [0, 1]
    ours, theirs = weights_of(here.target), weights_of(target)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() <= 1e-6 for name in ours)
    made = read_json(target, MANIFEST)["made_with"]
    assert (made["backend"], made["unsloth"]) == ("unsloth", "1.2.3")
    # Asked here, it tells of that environment, not of this one.
    assert {name: made_with(there.config)[name] for name in made if name != "threads"} == {
        name: value for name, value in made.items() if name != "threads"
    }


@pytest.mark.slow
def test_why_an_interpreter_has_no_unsloth_for_the_trainer(stand_in: Path, tmp_path: Path):
    assert why_no_unsloth(stand_in) is None
    (unsloth,) = stand_in.parents[1].glob("lib/python*/site-packages/unsloth.py")
    unsloth.write_text(
        "import sys\nprint('a warning', file=sys.stderr)\nraise NotImplementedError('You need a GPU.')\n"
    )
    assert why_no_unsloth(stand_in) == "NotImplementedError: You need a GPU."
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    assert why_no_unsloth(silent) == "it ended with exit code 3"


def built_here(root: Path, trainer: str) -> Path:
    """A complete environment for this machine: its interpreter tells versions, and runs `trainer` for all else."""
    python = unsloth_recipe().python(root)
    python.parent.mkdir(parents=True)
    (unsloth_recipe().home(root) / "art-patch.json").write_text("{}")
    python.write_text(f"#!/bin/sh\n[ \"$1\" = -I ] && echo '{json.dumps(VERSIONS)}' && exit\n{trainer}\n")
    python.chmod(0o755)
    return python


VERSIONS = {"unsloth": "2026.10.9", "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("gpu", "trainer", "why_not"),
    [
        ("0", "exit 0", None),
        ("0", "echo 'ImportError: x' >&2; exit 1", "ImportError: x"),
        ("", "exit 0", "there is no CUDA GPU; Unsloth and the trainer can be imported"),
        ("", "echo 'ImportError: x' >&2; exit 1", "ImportError: x"),
    ],
)
def test_the_command_keeps_what_is_built_and_says_what_does_not_work(
    root: Path, monkeypatch: pytest.MonkeyPatch, gpu: str, trainer: str, why_not: str | None
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    python, home = built_here(root, trainer), unsloth_recipe().home(root)
    variables = {"XDG_DATA_HOME": os.environ["XDG_DATA_HOME"], "CUDA_VISIBLE_DEVICES": gpu}
    told = json.loads(art_patch("init", "unsloth", "--json", home=root, **variables).stdout)
    assert told == {"python": str(python), "versions": VERSIONS, "why_not": why_not}
    last = f"it cannot train on this machine: {why_not}" if why_not else "next: art-patch retrain --backend unsloth"
    assert art_patch("init", "unsloth", home=root, **variables).stdout.splitlines() == [
        f"Unsloth 2026.10.9 was there already, in {home}", last,
    ]  # fmt: skip
