"""Every bad adapter is refused before any engine sees it, with the file or tensor and the remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from art_patch.errors import AdapterRejected, ModelNotFound
from art_patch.policies import base_fingerprint, check_name, publish_adapter, read_base_model, validate_adapter
from tests.serving.conftest import edit_json
from tests.support.tiny import make_adapter_files, make_tiny_adapter, make_tiny_model

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def edit_tensors(work: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(work / "adapter_model.safetensors")
    change(tensors)
    save_file({key: value.clone() for key, value in tensors.items()}, work / "adapter_model.safetensors")


def fill(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def spoil(work: Path) -> None:
        def change(tensors: dict[str, Any]) -> None:
            tensors[Q] = tensors[Q].to(dtype)
            tensors[Q][1, 2] = value

        edit_tensors(work, change)

    return spoil


def multiply(factor: float) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for tensor in tensors.values():
            tensor *= factor

    return lambda work: edit_tensors(work, change)


def rename_all(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for key in list(tensors):
            tensors[key.replace(old, new)] = tensors.pop(key)

    return lambda work: edit_tensors(work, change)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda work: edit_json(work / "adapter_config.json", **changes)


def weights(content: bytes) -> Callable[[Path], object]:
    return lambda work: (work / "adapter_model.safetensors").write_bytes(content)


def truncate(work: Path) -> None:
    path = work / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def extra_layers(tensors: dict[str, Any]) -> None:
    for key in [key for key in tensors if ".layers.1." in key]:
        tensors[key.replace(".layers.1.", ".layers.7.")] = tensors[key]


def without_q(tensors: dict[str, Any]) -> None:
    del tensors[Q], tensors[Q.replace("lora_A", "lora_B")]


def wider(tensors: dict[str, Any]) -> None:
    tensors[Q] = torch.zeros(4, 256)


BEFORE_PUBLISHING: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank above max": (config(r=65), "r = 65; this engine serves ranks 1 to"),
    "rank is no number": (config(r=True), "r = True"),
    "DoRA": (config(use_dora=True), "use_dora = True is not served"),
    "bias": (config(bias="all"), "bias = 'all'"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "rank_pattern": (config(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "pissa": (config(init_lora_weights="pissa"), "init_lora_weights"),
    "not LoRA": (config(peft_type="IA3"), "peft_type is 'IA3'"),
    "alpha": (config(lora_alpha=-1), "lora_alpha = -1"),
    "config is not JSON": (lambda work: (work / "adapter_config.json").write_text("{r: 4"), "is not JSON"),
    "config is a list": (lambda work: (work / "adapter_config.json").write_text("[]"), "is not a JSON object"),
    "wrong base width": (lambda work: edit_tensors(work, wider), "has shape (4, 256); the base weight"),
    "truncated": (truncate, "is not a whole safetensors file"),
    "random bytes": (weights(os.urandom(2000)), "is not a whole safetensors file"),
    "empty file": (weights(b""), "is not a whole safetensors file"),
    "no tensors": (lambda work: save_file({}, work / "adapter_model.safetensors"), "lacks model.layers.0"),
    "extra layers": (lambda work: edit_tensors(work, extra_layers), "layers.7.mlp.down_proj, which the base model"),
    "config r is not tensor rank": (config(r=8), "says r = 8: the scaling would be wrong"),
    "wrong prefix": (rename_all("base_model.model.", ""), "is no LoRA weight of this base"),
    "wrong inner prefix": (rename_all("model.layers", "layers"), "which the base model"),
    "missing module": (lambda work: edit_tensors(work, without_q), "lacks model.layers.0.self_attn.q_proj"),
    "missing half": (lambda work: edit_tensors(work, lambda t: t.pop(Q)), "only one of lora_A and lora_B"),
    "unnamed module": (config(target_modules=["q_proj"]), "which target_modules does not name"),
    "no targets": (config(target_modules=None), "target_modules = None"),
    "NaN": (fill(float("nan")), "q_proj.lora_A.weight holds NaN or infinity"),
    "infinity": (fill(float("-inf")), "holds NaN or infinity"),
    "NaN in bfloat16": (fill(float("nan"), torch.bfloat16), "holds NaN or infinity"),
    "NaN in float16": (fill(float("inf"), torch.float16), "holds NaN or infinity"),
    "integers": (fill(1, torch.int32), "has dtype I32"),
    "exploded": (multiply(1e5), "it may change a weight of model.layers"),
    "overflowing": (fill(1e30), "more than 1000"),
}  # fmt: skip


@pytest.mark.parametrize("case", BEFORE_PUBLISHING)
def test_content_that_does_not_fit_is_refused(case: str, base_dir: Path, tmp_path: Path) -> None:
    spoil, reason = BEFORE_PUBLISHING[case]
    base = read_base_model(base_dir)
    work = make_adapter_files(tmp_path / "work", base_dir)
    spoil(work)
    publish_adapter(work, tmp_path / "agent@1", base_sha256=base.sha256)
    with pytest.raises(AdapterRejected) as refusal:
        validate_adapter(tmp_path, "agent@1", base)
    assert reason in str(refusal.value)
    assert str(refusal.value).startswith("agent@1: ")


def link(name: str) -> Callable[[Path], None]:
    def spoil(final: Path) -> None:
        target = final.parent / "elsewhere"
        shutil.move(final / name, target)
        (final / name).symlink_to(target)

    return spoil


def link_directory(final: Path) -> None:
    final.rename(final.parent / "real")
    final.symlink_to(final.parent / "real")


AFTER_PUBLISHING: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (lambda final: (final / "adapter_model.bin").write_bytes(b"x"), "may run code when read"),
    "unknown file": (lambda final: (final / "run.py").write_text(""), "run.py does not belong"),
    "sub-directory": (lambda final: (final / "sub").mkdir(), "sub is not a plain file"),
    "fifo": (lambda final: os.mkfifo(final / "README.md"), "README.md is not a plain file"),
    "file link": (link("adapter_model.safetensors"), "adapter_model.safetensors is a symbolic link"),
    "manifest link": (link("MANIFEST.json"), "MANIFEST.json cannot be read"),
    "directory link": (link_directory, "is a symbolic link"),
    "no manifest": (lambda final: (final / "MANIFEST.json").unlink(), "MANIFEST.json cannot be read"),
    "no config": (lambda final: (final / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    "no weights": (lambda final: (final / "adapter_model.safetensors").unlink(), "safetensors is missing"),
    "config changed": (lambda final: edit_json(final / "adapter_config.json", r=8), "sha256 differs"),
    "weights changed": (truncate, "sha256 differs"),
    "file not in manifest": (lambda final: (final / "README.md").write_text("hi"), "does not match the directory"),
    "manifest lists nothing": (lambda final: edit_json(final / "MANIFEST.json", files=None), "lists no files"),
    "other base": (lambda final: edit_json(final / "MANIFEST.json", base_sha256="0" * 64), "for another base model"),
    "no directory": (shutil.rmtree, "no directory"),
}


@pytest.mark.parametrize("case", AFTER_PUBLISHING)
def test_a_directory_that_was_tampered_with_is_refused(case: str, base_dir: Path, tmp_path: Path) -> None:
    spoil, reason = AFTER_PUBLISHING[case]
    final = make_tiny_adapter(tmp_path, base_dir)
    spoil(final)
    with pytest.raises(AdapterRejected) as refusal:
        validate_adapter(tmp_path, "agent@1", read_base_model(base_dir))
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    ["", "agent", "agent@", "@1", "agent@x", "../agent@1", "a/b@1", "agent@1\n", ".agent@1", "agent@1234567890", "é@1",
     "a" * 65 + "@1", "agent@1/../agent@1", "/etc/passwd", None, 3],
)  # fmt: skip
def test_names_that_could_lead_elsewhere_are_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match="is not a policy name"):
        check_name(name)


def test_a_good_adapter_comes_back_as_the_bytes_that_were_checked(base_dir: Path, tmp_path: Path) -> None:
    final = make_tiny_adapter(tmp_path, base_dir, "shop-bot.v2", 12, rank=3)
    adapter = validate_adapter(tmp_path, "shop-bot.v2@12", read_base_model(base_dir))
    assert (adapter.name, adapter.directory, adapter.rank) == ("shop-bot.v2@12", final, 3)
    assert adapter.weights == (final / "adapter_model.safetensors").read_bytes()
    assert len(adapter.modules) == 14
    assert json.loads((final / "MANIFEST.json").read_text())["files"]["adapter_model.safetensors"] == adapter.sha256


def test_what_peft_saves_is_accepted(base_dir: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base_dir), lora).save_pretrained(tmp_path / "work")
    publish_adapter(tmp_path / "work", tmp_path / "agent@1", base_sha256=base_fingerprint(base_dir))
    assert len(validate_adapter(tmp_path, "agent@1", read_base_model(base_dir)).modules) == 4


def test_a_policy_is_never_overwritten(base_dir: Path, tmp_path: Path) -> None:
    final = make_tiny_adapter(tmp_path, base_dir)
    before = (final / "MANIFEST.json").read_bytes()
    with pytest.raises(AdapterRejected, match="a policy never changes"):
        make_tiny_adapter(tmp_path, base_dir, seed=2)
    assert (final / "MANIFEST.json").read_bytes() == before


def test_publishing_refuses_what_is_no_adapter(base_dir: Path, tmp_path: Path) -> None:
    work = make_adapter_files(tmp_path / "work", base_dir)
    (work / "optimizer.pt").write_bytes(b"")
    with pytest.raises(AdapterRejected, match=r"optimizer\.pt may run code"):
        publish_adapter(work, tmp_path / "agent@1", base_sha256="")
    assert not (tmp_path / "agent@1").exists()


def test_the_fingerprint_tells_two_fine_tunes_of_one_architecture_apart(base_dir: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again")
    other = make_tiny_model(tmp_path / "other", seed=1)
    assert base_fingerprint(again) == base_fingerprint(base_dir)
    assert base_fingerprint(other) != base_fingerprint(base_dir)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_directory_without_a_model_says_what_is_missing(broken: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "base")
    (directory / broken).write_bytes(b"junk")
    with pytest.raises(ModelNotFound, match=broken):
        read_base_model(directory)
    (directory / broken).unlink()
    with pytest.raises(ModelNotFound):
        read_base_model(directory)


PROBE = {
    "token_ids": [1, 2, 3], "target_ids": [4, 5], "logprobs": [-1.0, -2.0], "base_logprobs": [-1.5, -2.5],
    "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": [-1.0, float("nan")]}, "the trainer's own log-probabilities are not finite"),
        ({"base_logprobs": [-1.0]}, "has the wrong number of values"),
        ({"token_ids": "abc"}, "cannot be read"),
        ({"dtype": None, "logprobs": None}, "cannot be read"),
    ],
)
def test_a_canary_that_says_nothing_is_refused(
    change: dict[str, Any], reason: str, base_dir: Path, tmp_path: Path
) -> None:
    base = read_base_model(base_dir)
    work = make_adapter_files(tmp_path / "work", base_dir)
    publish_adapter(work, tmp_path / "agent@1", base_sha256=base.sha256, extra={"probe": {**PROBE, **change}})
    with pytest.raises(AdapterRejected, match=reason):
        validate_adapter(tmp_path, "agent@1", base)


def test_a_canary_is_read_with_the_adapter(base_dir: Path, tmp_path: Path) -> None:
    base = read_base_model(base_dir)
    work = make_adapter_files(tmp_path / "work", base_dir)
    publish_adapter(work, tmp_path / "agent@1", base_sha256=base.sha256, extra={"probe": PROBE})
    found = validate_adapter(tmp_path, "agent@1", base).probe
    assert found is not None
    assert found.entry() == PROBE
