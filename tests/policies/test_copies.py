"""A merged model is the base with its LoRA, to the logit, and what cannot be merged is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_patch.errors import AdapterRejected, ConfigError
from art_patch.policies import (
    ENTRY,
    BaseModel,
    Merged,
    Probe,
    ValidatedAdapter,
    publish_adapter,
    read_base_model,
    validate_adapter,
    write_adapter,
    write_merged,
)
from art_patch.policies.copies import BESIDE_WEIGHTS
from tests.support.tiny import make_adapter_files, make_tiny_model

IDS = torch.tensor([[300, 40, 41, 77, 5, 200, 12, 9]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    directory = make_tiny_model(tmp_path_factory.mktemp("base"), hidden=32, vocab_size=320)
    # Some bases say what transformers refuses to save; a merged model says it, too.
    (directory / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    return read_base_model(directory)


@pytest.fixture
def publish(tmp_path: Path, base: BaseModel) -> Callable[..., ValidatedAdapter]:
    def published(**extra: Any) -> ValidatedAdapter:
        work = make_adapter_files(tmp_path / ".work", base.directory)
        publish_adapter(work, tmp_path / "agent@1", base_sha256=base.sha256, extra=extra)
        return validate_adapter(tmp_path, "agent@1", base)

    return published


def written(adapter: ValidatedAdapter, base: BaseModel, directory: Path, **how: Any) -> Merged:
    directory.mkdir()
    steps: list[tuple[int, int]] = []
    found = write_merged(adapter, base, directory, step=lambda done, total, _: steps.append((done, total)), **how)
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    return found


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    return model(IDS).logits[0]


def with_adapter(base: BaseModel, directory: Path) -> torch.Tensor:
    """By PEFT alone."""
    return logits_of(PeftModel.from_pretrained(plain(base.directory), str(directory)).eval())


def plain(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def test_the_merged_model_computes_what_base_and_lora_compute(
    base: BaseModel, publish: Callable[..., ValidatedAdapter], tmp_path: Path
):
    adapter = publish()
    assert written(adapter, base, tmp_path / "merged") == Merged("float32", None, ())
    expected, merged = with_adapter(base, adapter.directory), plain(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-5, atol=1e-5)
    assert (logits_of(plain(base.directory)) - expected).abs().max() > 0.1
    for name in filter(lambda name: (base.directory / name).is_file(), BESIDE_WEIGHTS):
        assert (tmp_path / "merged" / name).read_bytes() == (base.directory / name).read_bytes()
    messages = [{"role": "user", "content": "how many plums?"}]
    both = [AutoTokenizer.from_pretrained(path) for path in (tmp_path / "merged", base.directory)]
    ours, theirs = (one.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for one in both)
    assert ours == theirs
    assert written(adapter, base, tmp_path / "half", dtype="bfloat16") == Merged("bfloat16", None, ())
    assert plain(tmp_path / "half").dtype == torch.bfloat16


def test_it_is_compared_with_what_the_trainer_computed(
    base: BaseModel, publish: Callable[..., ValidatedAdapter], tmp_path: Path
):
    adapter = publish()
    with_lora, without = (
        each[:-1].log_softmax(-1).gather(1, IDS[0, 1:, None]).squeeze(1).tolist()
        for each in (with_adapter(base, adapter.directory), logits_of(plain(base.directory)))
    )
    true = Probe(tuple(IDS[0].tolist()), tuple(with_lora), tuple(without), "float32")
    shutil.rmtree(adapter.directory)
    adapter = publish(**{ENTRY: true.entry()})
    gap_nats = written(adapter, base, tmp_path / "merged").gap_nats
    assert gap_nats is not None and gap_nats < 1e-4
    with pytest.raises(AdapterRejected, match="nats from the trainer's"):
        written(replace(adapter, probe=replace(true, logprobs=true.base_logprobs)), base, tmp_path / "other")


def test_the_lora_alone_is_one_that_peft_reads(
    base: BaseModel, publish: Callable[..., ValidatedAdapter], tmp_path: Path
):
    adapter = publish()
    (tmp_path / "copy").mkdir()
    write_adapter(adapter, tmp_path / "copy", base_name="org/base")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((tmp_path / "copy" / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    assert torch.equal(with_adapter(base, tmp_path / "copy"), with_adapter(base, adapter.directory))


def test_what_cannot_be_merged_is_refused(base: BaseModel, publish: Callable[..., ValidatedAdapter], tmp_path: Path):
    adapter = publish()
    with pytest.raises(AdapterRejected, match="lm_head, which the base shares with its embedding"):
        written(replace(adapter, modules=("lm_head",)), base, tmp_path / "tied")
    shapes = dict(base.weight_shapes)
    del shapes["model.norm.weight"]
    with pytest.raises(AdapterRejected, match=r"other tensors than its base .model\.norm\.weight"):
        written(adapter, replace(base, weight_shapes=shapes), tmp_path / "other")
    more = replace(base, weight_shapes=base.weight_shapes | {"mtp.weight": (2, 2)})
    assert written(adapter, more, tmp_path / "more").left_out == ("mtp.weight",)
    quantised = Path(shutil.copytree(base.directory, tmp_path / "quantised"))
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised"):
        written(adapter, replace(base, directory=quantised), tmp_path / "merged")
