"""Bases of no use, told from their small files by `serve`, `doctor` and `retrain`, before anything is started."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from art_patch import serving
from art_patch.cli.app import app
from art_patch.doctor import engine
from art_patch.errors import ConfigError, ModelNotFound
from art_patch.pipeline import check_base, untrained
from art_patch.policies import read_config
from art_patch.rewards import Judge
from tests.support.cycles import Place
from tests.support.families import REFUSED


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(base: Path) -> None:
        config = json.loads((base / "config.json").read_text()) | changes
        (base / "config.json").write_text(json.dumps(config))

    return edit


def without(*patterns: str) -> Callable[[Path], None]:
    def remove(base: Path) -> None:
        for pattern in patterns:
            for path in base.glob(pattern):
                path.unlink()

    return remove


def quantised(base: Path) -> None:
    (path,) = base.glob("*.safetensors")
    packed = {name: tensor.reshape(-1, 1) if tensor.ndim == 2 else tensor for name, tensor in load_file(path).items()}
    save_file(packed, path)


@pytest.mark.parametrize(
    "experts", [{"num_experts": 8}, {"num_local_experts": 8}, {"text_config": {"n_routed_experts": 8}}]
)
def test_of_a_mixture_of_experts_it_is_said_what_learns(base: Path, tmp_path: Path, experts: dict[str, Any]):
    copy = shutil.copytree(base, tmp_path / "base")
    assert untrained(str(copy)) is None
    edited(**experts)(copy)
    assert untrained(str(copy)) == "its routed experts and routers get no LoRA: mainly its attention learns"
    assert untrained(str(tmp_path / "none")) is None


USELESS = {
    "encoder-decoder": (edited(is_encoder_decoder=True), "it is an encoder-decoder"),
    "no causal": (edited(architectures=["BertForMaskedLM"]), "it is a BertForMaskedLM, which does not continue a text"),
    "no tokenizer": (without("tokenizer.json", "vocab*"), "it has no tokenizer"),
    "no template": (without("chat_template.jinja"), "it has no chat template"),
    "unknown": (
        edited(model_type="qwen9"),
        r"transformers that is installed \(\S+\) says: Unrecog\w+ model \w+: qwen9; up",
    ),
    "quantised": (quantised, "no plain linear layers"),
}


@pytest.fixture
def copy(tmp_path: Path, base: Path) -> Path:
    return shutil.copytree(base, tmp_path / "copy")


@pytest.mark.parametrize("kind", USELESS)
def test_a_base_of_no_use_is_told_by_all_three(tmp_path: Path, copy: Path, place: Place, judge: Judge, kind: str):
    spoil, words = USELESS[kind]
    spoil(copy)
    with pytest.raises(ConfigError, match=words):
        check_base(str(copy))
    found = engine.base(str(copy), check_base)
    assert found is not None and (found.level, bool(re.search(words, found.text))) == ("bad", True)
    said = CliRunner().invoke(app, ["serve", "--base", str(copy), "--home", str(tmp_path / "home"), "--port", "0"])
    assert isinstance(said.exception, ConfigError) and re.search(words, str(said.exception))
    if kind != "no template":  # an engine may have one from elsewhere, and serves already
        with place.store._database.write() as connection:
            connection.exec_driver_sql(f"UPDATE policies SET base = '{copy}'")
        place.traffic(siblings=1)
        asked: list[Any] = []
        with pytest.MonkeyPatch.context() as patched, pytest.raises(ConfigError, match=words):
            patched.setattr(serving.EngineClient, "chat", lambda *_, **body: asked.append(body))
            place.cycle(judge)
        assert (asked, place.stages) == ([], [])


@pytest.mark.parametrize("kind", REFUSED)
def test_a_base_that_also_sees_is_looked_at_closely(tmp_path: Path, base: Path, kind: str):
    make, words = REFUSED[kind]
    make().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(base / name, tmp_path / name)
    with pytest.raises(ConfigError, match=words):
        check_base(str(tmp_path))
    check_base(str(tmp_path), closely=False)


def test_a_model_of_the_hub_whose_weights_are_still_to_come_is_no_fault(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """As after a download that was interrupted, which `serve` goes on with."""
    (path,) = copy.glob("*.safetensors")
    shards = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(load_file(path))}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    path.rename(copy / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelNotFound):
        check_base(str(copy))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(copy))
    check_base("somebody/model")


@pytest.mark.parametrize("odd", [{"rope_scaling": [1]}, {"architectures": 5}, {"architectures": "LlamaForCausalLM"}])
def test_odd_values_in_a_config_are_left_to_who_loads_it(copy: Path, odd: dict[str, Any]):
    edited(**odd)(copy)
    check_base(str(copy))


def test_what_is_fine_or_not_here_is_left_to_others(copy: Path, tmp_path: Path):
    check_base(str(copy))
    assert engine.base(str(copy), check_base).level == "ok"  # type: ignore[union-attr]
    assert engine.base(None, check_base) is engine.base("/not/here", check_base) is None
    check_base("/not/here")
    without("chat_template.jinja")(copy)
    check_base(str(copy), has_template=True)
    for broken in ("[]", "[" * 100_000):
        (copy / "config.json").write_text(broken)
        with pytest.raises(ModelNotFound, match=r"config\.json is missing or broken"):
            check_base(str(copy))


def test_code_of_a_checkpoint_is_never_run_though_somebody_says_yes(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a terminal, where transformers would ask whether to run it."""
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w').close()\nclass Config: ...\n")
    edited(model_type="qwen9", auto_map={"AutoConfig": "evil.Config"})(copy)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(ValueError, match="custom code"):
        read_config(copy)
    assert not (copy / "ran").exists()
