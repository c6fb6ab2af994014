"""A base in 4 or 8 bits: what is lost by packing, and that everything else is computed as with whole weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from art_patch.errors import ConfigError, TrainingError
from art_patch.policies import read_base_model, validate_adapter
from art_patch.training import TrainConfig
from art_patch.training.loop.loading import fuse, load_policy
from art_patch.training.loop.update import update
from art_patch.training.packed import PackedLinear, exact, pack, pack_layers, unpack
from tests.benchmarks.families_bits import learned, metrics_of
from tests.support.train_jobs import SMALL, make_job, plain_logprobs, plain_model, random_groups, row

ROW = row((5, 6, 7), (20, 21, 22, 23, 24))


def test_levels_come_back_as_they_were():
    levels = torch.tensor([-1.0, -0.6961928009986877, 0.0, 0.07958029955625534, 0.5626170039176941, 1.0])
    weight = 2 * levels[torch.arange(128) % 6]
    assert torch.equal(unpack(*pack(weight, 4), torch.float32).view(-1), weight)


@pytest.mark.parametrize(("bits", "size", "most"), [(4, 0.5, 0.1), (8, 1.0, 0.006)])
def test_what_packing_loses_and_saves(bits: int, size: float, most: float):
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    codes, scale = pack(weight, bits)
    assert (codes.nbytes, scale.nbytes) == (size * weight.numel(), weight.numel() / 32)
    lost = unpack(codes, scale, torch.float32).view_as(weight) - weight
    assert float(lost.norm() / weight.norm()) < most


def test_a_block_of_zeros_stays_zero():
    for bits in (4, 8):
        assert not unpack(*pack(torch.zeros(64), bits), torch.float32).any()


def test_a_packed_layer_computes_as_a_plain_one_with_its_weights(base: Path):
    packed = load_policy(str(base), None, replace(SMALL, base_bits=4))
    whole = load_policy(str(base), None, SMALL)
    layers = {name: layer for name, layer in packed.named_modules() if isinstance(layer, PackedLinear)}
    assert len(layers) == sum(name.endswith("base_layer") for name, _ in whole.named_modules())
    for name, layer in layers.items():
        whole.get_submodule(name).weight.data = layer.unpacked()
    for model in (packed, whole):
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
        model(input_ids=torch.tensor([ROW.ids_T])).logits.log_softmax(-1)[..., 3].sum().backward()
    assert plain_logprobs(packed, ROW) == pytest.approx(plain_logprobs(whole, ROW), abs=1e-5)
    theirs = {name: weight.grad for name, weight in whole.named_parameters() if weight.grad is not None}
    ours = {name: weight.grad for name, weight in packed.named_parameters() if weight.grad is not None}
    assert theirs.keys() == ours.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, atol=1e-5, rtol=1e-4)
    with packed.disable_adapter(), whole.disable_adapter():
        assert plain_logprobs(packed, ROW) == pytest.approx(plain_logprobs(whole, ROW), abs=1e-5)


def test_dropout_goes_through_a_packed_layer_backwards(base: Path):
    model = load_policy(str(base), None, replace(SMALL, base_bits=8, lora_dropout=0.5)).train()
    model(input_ids=torch.tensor([ROW.ids_T])).logits.sum().backward()
    assert all(weight.grad is not None for name, weight in model.named_parameters() if "lora_A" in name)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_update_publishes_what_the_whole_base_serves(base: Path, tmp_path: Path, bits: int):
    """The probe, with which a server proves a policy, is computed with the checkpoint's weights."""
    groups = random_groups(base, groups=2, siblings=4)
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, base_bits=bits)
    done = update(job, tmp_path / "job")
    assert done.logprob_gap_mean_nats is not None
    assert done.logprob_gap_mean_nats > 1e-4
    probe = validate_adapter(tmp_path / "adapters", "agent@1", read_base_model(base)).probe
    assert probe is not None
    with torch.no_grad():
        logits = plain_model(base, job.target)(input_ids=torch.tensor([probe.token_ids[:-1]])).logits[0]
    told = logits.log_softmax(-1).gather(1, torch.tensor(probe.targets)[:, None])[:, 0]
    assert list(probe.logprobs) == pytest.approx(told.tolist(), abs=1e-4)


def test_the_guard_holds_the_gap_and_says_what_helps(base: Path, tmp_path: Path):
    groups = random_groups(base, groups=2, siblings=4)
    job = make_job(base, tmp_path / "adapters" / "agent@1", groups, base_bits=4, max_gap_nats=1e-4)
    with pytest.raises(TrainingError, match=r"base has 4 bits, differ by .* take base_bits=8"):
        update(job, tmp_path / "job")
    assert not job.target.exists()


def test_the_checkpoint_is_read_again_inside_of_exact(base: Path):
    model: Any = load_policy(str(base), None, replace(SMALL, base_bits=4))
    with exact(model):
        inside = plain_logprobs(model, ROW)
    assert inside == pytest.approx(plain_logprobs(plain_model(base), ROW), abs=1e-5)
    assert plain_logprobs(model, ROW) != pytest.approx(inside, abs=1e-4)


def test_weights_that_no_file_backs_are_refused_rather_than_lost():
    model: Any = nn.Sequential(nn.Linear(256, 256))
    model.dtype = torch.float32
    with pytest.raises(ConfigError, match="safetensors files that can be mapped"):
        pack_layers(model, ["0"], 4, torch.float32, torch.device("cpu"))


def test_bits_that_there_are_not():
    with pytest.raises(ConfigError, match="base_bits=5 must be 4, 8 or 16"):
        TrainConfig(base_bits=5)
    with pytest.raises(ConfigError, match="for the backend peft"):
        TrainConfig(base_bits=4, backend="unsloth")


def test_packed_layers_are_fused_as_plain_ones(base: Path):
    model = load_policy(str(base), None, replace(SMALL, base_bits=4))
    assert fuse(model) == sum(isinstance(layer, PackedLinear) for layer in model.modules())


def test_success_with_4_bits_is_compared_question_by_question_and_seed_by_seed():
    rows: list[dict[str, Any]] = [
        {"seed": 1, "asked": 100, "success_16": [0.2, 0.5], "success_4": [0.2, 0.5], "logprob_gap_4": [0.004]},
        {"seed": 2, "asked": 100, "success_16": [0.4, 0.9], "success_4": [0.4, 0.7], "logprob_gap_4": [0.006]},
    ]
    both = metrics_of(rows)
    assert both == pytest.approx({
        "bits4_gap": 0.1, "bits4_gap_error": 0.1, "bits4_first_gap": 0.1, "success_before": 0.3, "success_16": 0.7,
        "success_4": 0.6, "bits4_logprob_gap_nats": 0.006,
    })  # fmt: skip
    assert metrics_of(rows[:1])["bits4_gap_error"] == pytest.approx(0.5**0.5 / 10)  # of the questions alone


@pytest.mark.full
def test_the_demo_s_agent_learns_with_a_base_in_4_bits(tmp_path: Path):
    found = learned(1, 1, tmp_path, scenarios=60, questions=60, times=4)
    assert min(found["success_16"][1], found["success_4"][1]) > found["success_16"][0]
    assert found["logprob_gap_16"][0] < 1e-5 < found["logprob_gap_4"][0] < 0.05
