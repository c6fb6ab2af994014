"""Every bad adapter is refused before any engine sees it, with the file or tensor and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from art_patch.errors import AdapterRejected, ModelNotFound
from art_patch.policies import base_fingerprint, check_name, publish_adapter, read_base_model, validate_adapter
from tests.support.broken_adapters import (
    AFTER_PUBLISHING,
    BEFORE_PUBLISHING,
)
from tests.support.tiny import make_adapter_files, make_tiny_adapter, make_tiny_model


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
