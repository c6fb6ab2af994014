"""A plain LoRA of PEFT becomes a policy: it computes what PEFT computes, and what no engine serves is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import AdapterRejected
from art_patch.policies import WEIGHTS, read_base_model, read_lora, validate_adapter
from art_patch.policies.base_models import BaseModel
from tests.benchmarks.families_start import LORAS, adopted, logprobs_of, make_lora
from tests.support.tiny import make_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return read_base_model(make_tiny_model(tmp_path_factory.mktemp("models") / "base", hidden=32, vocab_size=320))


@pytest.mark.parametrize("name", LORAS)
def test_it_computes_what_peft_computes(base: BaseModel, tmp_path: Path, name: str):
    lora = make_lora(tmp_path / name, base.directory, LORAS[name])
    published = adopted(lora, base, tmp_path / "adapters")
    theirs, ours = (logprobs_of(base.directory, each) for each in (lora, published))
    assert float((theirs - ours).abs().max()) <= 1e-6
    # It does something, and the probe that servers must compute says what.
    assert float((theirs - logprobs_of(base.directory, None)).abs().max()) > 1e-2
    found = validate_adapter(tmp_path / "adapters", "agent@1", base)
    assert found.probe is not None and found.probe.logprobs != found.probe.base_logprobs
    assert found.rank == (12 if "rank_pattern" in LORAS[name] else LORAS[name]["r"])


def changed(directory: Path, **config: Any) -> Path:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def test_what_no_engine_serves_is_refused(base: BaseModel, tmp_path: Path):
    lora = make_lora(tmp_path / "lora", base.directory, LORAS["other rank and layers"])

    def refused(words: str, sha256: str | None = None) -> None:
        with pytest.raises(AdapterRejected) as raised:
            read_lora(lora, base, sha256=sha256)
        assert words in str(raised.value)

    refused("it is another LoRA", "00" * 32)
    for setting, value in (("use_dora", True), ("bias", "all"), ("modules_to_save", ["lm_head"]), ("peft_type", "IA3")):
        changed(lora, **{setting: value})
        refused(setting)
        changed(lora, **{setting: {"peft_type": "LORA", "bias": "none", "use_dora": False}.get(setting)})
    weights = (lora / WEIGHTS).read_bytes()
    (lora / WEIGHTS).write_bytes(weights[:-9])
    refused("is not a whole safetensors file")
    (lora / WEIGHTS).unlink()
    (lora / "adapter_model.bin").write_bytes(b"pickle")
    refused("is a pickle")
    (lora / "adapter_model.bin").unlink()
    refused("so it is neither a policy's copy nor a LoRA")
    other = make_tiny_model(tmp_path / "other", hidden=64, vocab_size=320)
    strange = make_lora(tmp_path / "strange", other, LORAS["other rank and layers"])
    with pytest.raises(AdapterRejected, match=r"needs \(3, \d+\)"):
        read_lora(strange, base)


def test_a_lora_that_is_not_finite_is_refused(base: BaseModel, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    lora = make_lora(tmp_path / "lora", base.directory, LORAS["other rank and layers"])
    tensors = load_file(lora / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, lora / WEIGHTS)
    with pytest.raises(AdapterRejected, match="NaN or infinity"):
        read_lora(lora, base)
