"""Each family as a tiny random model: where its LoRA goes, that it learns, and that serving takes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import TrainingError
from art_patch.policies import BaseModel, load_model, publish_adapter, read_base_model, validate_adapter
from art_patch.training import family_of
from art_patch.training.families import DEFAULT, FAMILIES, linear_names, target_names
from tests.benchmarks.families import families
from tests.support.families import (
    CONFIGS,
    EXPERTS,
    SEEING,
    is_computed,
    logits_of,
    make_model,
    make_model_that_sees,
    with_lora,
)  # fmt: skip
from tests.support.real_bases import BASES

ROOT = Path(__file__).resolve().parents[2]
ATTENTION = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
LATENT_ATTENTION = ["self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"]
TARGETS: dict[str, list[str]] = {
    "qwen2_moe": [*ATTENTION, "shared_expert.down_proj", "shared_expert.gate_proj", "shared_expert.up_proj"],
    "qwen3_moe": ATTENTION,
    "qwen3_next": [
        "linear_attn.in_proj_ba",
        "linear_attn.in_proj_qkvz",
        "linear_attn.out_proj",
        *ATTENTION,
    ],
    "gpt_oss": ATTENTION,
    "deepseek_v2": [*LATENT_ATTENTION, "self_attn.q_proj"],
    "deepseek_v3": [*LATENT_ATTENTION, "self_attn.q_a_proj", "self_attn.q_b_proj"],
    "phi3": ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"],
    "mixtral": ATTENTION,
    "glm4_moe": ATTENTION,
    "granitemoe": ATTENTION,
    "opt": ["fc1", "fc2", "self_attn.k_proj", "self_attn.out_proj", "self_attn.q_proj", "self_attn.v_proj"],
}
IDS_BT = torch.tensor([[3, 9, 27, 17, 51, 25, 11, 33], [5, 25, 61, 49, 53, 9, 45, 33]])


def adapted(tuned: Any) -> set[str]:
    """The modules of the base that have a LoRA."""
    return {
        name.removeprefix("base_model.model.").partition(".lora_A")[0]
        for name, _ in tuned.named_parameters()
        if "lora_A" in name
    }


@pytest.mark.parametrize("model_type", CONFIGS)
def test_where_the_lora_goes(model_type: str):
    model = make_model(model_type)
    ends = target_names(model)
    assert ends == sorted(TARGETS.get(model_type, [*MLP, *ATTENTION]))
    expected = {name for name in linear_names(model) if name.endswith(tuple(f".{end}" for end in ends))}
    tuned = with_lora(model)
    assert adapted(tuned) == expected
    assert {name for name, weight in tuned.named_parameters() if weight.requires_grad} == {
        f"base_model.model.{name}.lora_{side}.default.weight" for name in expected for side in "AB"
    }


@pytest.mark.parametrize("model_type", CONFIGS)
def test_everything_targeted_learns_and_nothing_else(model_type: str):
    tuned = with_lora(make_model(model_type))
    tuned(input_ids=IDS_BT, labels=IDS_BT).loss.backward()
    for name, weight in tuned.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None and weight.grad.abs().max() > 0, name
        else:
            assert weight.grad is None, name


@pytest.mark.parametrize("model_type", CONFIGS)
def test_an_adapter_that_is_read_back_computes_the_same_and_serving_takes_it(model_type: str, tmp_path: Path):
    tuned, base = published(make_model(model_type), tmp_path)
    assert validate_adapter(tmp_path, "agent@1", base).modules == tuple(sorted(adapted(tuned)))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        expected = tuned(input_ids=IDS_BT).logits
        plain = AutoModelForCausalLM.from_pretrained(base.directory)
        bare = plain(input_ids=IDS_BT).logits
        again = PeftModel.from_pretrained(plain, str(tmp_path / "agent@1"))(input_ids=IDS_BT).logits
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    assert (bare - expected).abs().max() > 1e-3


def published(model: Any, root: Path) -> tuple[Any, BaseModel]:
    """A model with a LoRA, the model's directory, and the LoRA published beside it, as the trainer does."""
    model.save_pretrained(root / "base")
    base = read_base_model(root / "base")
    tuned = with_lora(model)
    tuned.save_pretrained(root / "new")
    publish_adapter(root / "new", root / "agent@1", base_sha256=base.sha256)
    return tuned, base


LINEAR_ATTENTION = ["in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]
"""Of Qwen 3.5's first layer; the second has attention."""


@pytest.mark.parametrize("model_type", SEEING)
def test_of_a_model_that_also_sees_only_the_part_that_writes_is_trained(model_type: str):
    model = make_model_that_sees(model_type)
    assert any("vision" in name or "visual" in name for name, _ in model.named_modules())
    layers = "language_model.model.layers" if model_type == "llama4" else "model.language_model.layers"
    mlp = [] if model_type == "llama4" else MLP
    expected = {f"{layers}.{layer}.{end}" for layer in range(2) for end in (*mlp, *ATTENTION)}
    if model_type == "qwen3_5":
        expected -= {f"{layers}.0.{end}" for end in ATTENTION}
        expected |= {f"{layers}.0.linear_attn.{end}" for end in LINEAR_ATTENTION}
    assert adapted(with_lora(model)) == expected


@pytest.mark.parametrize("model_type", SEEING)
def test_an_adapter_of_a_model_that_also_sees_is_read_back_and_served(model_type: str, tmp_path: Path):
    """Names in its checkpoint, of transformers' modules and of the adapter agree, however its makers named them."""
    from peft import PeftModel

    tuned, base = published(make_model_that_sees(model_type), tmp_path)
    assert validate_adapter(tmp_path, "agent@1", base).modules == tuple(sorted(adapted(tuned)))
    writes = {name for name, _ in make_model_that_sees(model_type).named_parameters() if "language_model" in name}
    assert writes <= base.weight_shapes.keys()
    plain = load_model(base.directory).eval()
    with torch.no_grad():
        expected = logits_of(tuned, IDS_BT)
        bare = logits_of(plain, IDS_BT)
        again = logits_of(PeftModel.from_pretrained(plain, str(tmp_path / "agent@1")), IDS_BT)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    assert (bare - expected).abs().max() > 1e-3


def test_a_router_that_is_a_linear_layer_is_left_out():
    model = make_model("afmoe", **EXPERTS, head_dim=8, num_experts=4, num_dense_layers=1)
    router = "model.layers.1.mlp.router.gate"
    assert isinstance(model.get_submodule(router), torch.nn.Linear)
    assert router not in linear_names(model)
    assert not [end for end in target_names(model) if end.endswith(".gate")]


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(TrainingError, match="gpt2 has no linear layer"):
        target_names(make_model("gpt2", n_embd=32, n_layer=2, n_head=4))


def test_the_table():
    types = [kind for family in FAMILIES for kind in family.model_types]
    assert len(types) == len(set(types))
    assert all(family_of(kind) is family for family in FAMILIES for kind in family.model_types)
    assert family_of("phi3") is DEFAULT


def test_the_documentation_names_each_family_and_its_types():
    page = (ROOT / "docs/pages/reference/base-models.md").read_text()
    table = re.findall(r"(?m)^\| ([^|]+) \| (`[^|]+) \|", page)[1:]  # the first one is the heading
    rows = {name: set(re.findall(r"`(\w+)`", types)) for name, types in table}
    assert rows == {family.name: set(family.model_types) for family in FAMILIES}


@pytest.mark.slow
def test_bases_that_people_serve_are_trained_exactly(tmp_path: Path):
    """The figure `families` of the benchmark: real configurations, made small."""
    bases = [
        name for name, base in BASES.items() if is_computed(base.model_type)
    ]  # the others are told, see test_oldest
    metrics, trained = families(tmp_path, bases)
    assert (metrics["refused"], trained) == ({}, bases)
    assert metrics["gradient_difference"] <= 1e-5
