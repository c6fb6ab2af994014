"""What is loaded computes exactly: no dropout, the parent's LoRA, one that is new, or another meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import ConfigError
from art_patch.training import Example, Row, TrainConfig
from art_patch.training.loop.loading import as_reference, backend_of, load_policy
from art_patch.training.loop.processes import ALONE
from art_patch.training.scoring import Scorer
from tests.support.tiny import make_tiny_adapter
from tests.support.train_jobs import SMALL, plain_logprobs, plain_model, row

ROW = row((5, 6, 7), (20, 21, 22), temperature=0.7)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_adapter(tmp_path_factory.mktemp("adapters"), base)


def scored(scorer: Scorer, row: Row = ROW) -> list[float]:
    with torch.no_grad():
        return scorer.score(ALONE.shard([Example((row,))], 99)[0]).logprob_N.tolist()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_it_computes_what_transformers_and_peft_compute(base: Path, adapter: Path, new: bool, recompute: bool):
    config = replace(SMALL, gradient_checkpointing=recompute)
    scorer = Scorer(load_policy(str(base), None if new else adapter, config))
    expected = plain_logprobs(plain_model(base, None if new else adapter), ROW)
    assert scored(scorer) == pytest.approx(expected, abs=1e-5)


def test_dropout_is_off_whatever_the_parent_and_the_base_say(base: Path, adapter: Path, tmp_path: Path):
    wet = tmp_path / "wet"
    wet.mkdir()
    for file in base.iterdir():
        (wet / file.name).write_bytes(file.read_bytes())
    config = json.loads((wet / "config.json").read_text())
    (wet / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    lora = tmp_path / "lora"
    lora.mkdir()
    for file in adapter.iterdir():
        (lora / file.name).write_bytes(file.read_bytes())
    settings = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps(settings | {"lora_dropout": 0.5}))
    for share in (True, False):
        model = load_policy(str(wet), lora, replace(SMALL, gradient_checkpointing=True))
        assert scored(Scorer(model, share=share)) == pytest.approx(
            plain_logprobs(plain_model(base, adapter), ROW), abs=1e-5
        )
    assert not {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}


def test_another_policy_computes_meanwhile_and_leaves_nothing_behind(base: Path, adapter: Path):
    model = load_policy(str(base), adapter, SMALL)
    scorer = Scorer(model)
    before = {name: (weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()}
    own = scored(scorer)
    with as_reference(model, None):
        assert scored(scorer) == pytest.approx(plain_logprobs(plain_model(base), ROW), abs=1e-5)
    fresh = load_policy(str(base), None, SMALL)
    of_fresh = Scorer(fresh)
    with as_reference(fresh, adapter):
        assert scored(of_fresh) == pytest.approx(own, abs=1e-6)
    assert scored(of_fresh) == pytest.approx(plain_logprobs(plain_model(base), ROW), abs=1e-5)
    assert scored(scorer) == own
    after = {name: (weight, weight.requires_grad) for name, weight in model.named_parameters()}
    assert before.keys() == after.keys() == dict(fresh.named_parameters()).keys()
    assert all(torch.equal(before[n][0], after[n][0]) and before[n][1] == after[n][1] for n in before)
    assert {n for n, w in fresh.named_parameters() if w.requires_grad} == {n for n in after if after[n][1]}


def test_a_new_lora_is_the_seeds_and_fp32_whatever_the_base_is(base: Path):
    def weights(**changes: Any) -> dict[str, torch.Tensor]:
        model = load_policy(str(base), None, replace(SMALL, **changes))
        return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    one, same, other, coarse = weights(), weights(), weights(seed=1), weights(dtype="bfloat16")
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert {weight.dtype for weight in coarse.values()} == {torch.float32}
    assert load_policy(str(base), None, replace(SMALL, dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_unsloth_is_taken_on_cuda_only():
    assert backend_of(TrainConfig()) == "peft"
    assert backend_of(TrainConfig(backend="peft")) == "peft"
    with pytest.raises(ConfigError, match="backend='unsloth', but there is no CUDA GPU; take backend='peft'"):
        backend_of(TrainConfig(backend="unsloth"))
