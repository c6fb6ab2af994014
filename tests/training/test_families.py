"""Each family as a tiny random model: where its LoRA goes, that it learns, and that serving takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from art_patch.errors import AdapterRejected, TrainingError
from art_patch.policies import BaseModel, publish_adapter, read_base_model, validate_adapter
from art_patch.training import family_of
from art_patch.training.families import DEFAULT, FAMILIES, linear_names, target_names
from tests.support.families import CONFIGS, EXPERTS, make_gemma_that_sees, make_model, with_lora

ATTENTION = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
MLP = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
LATENT_ATTENTION = ["self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"]
TARGETS: dict[str, list[str]] = {
    "qwen2_moe": [*ATTENTION, "shared_expert.down_proj", "shared_expert.gate_proj", "shared_expert.up_proj"],
    "qwen3_moe": ATTENTION,
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


def test_of_a_model_that_also_sees_only_the_part_that_writes_is_trained():
    model = make_gemma_that_sees()
    assert "model.vision_tower.encoder.layers.0.self_attn.q_proj" in dict(model.named_modules())
    assert target_names(model) == [
        f"model.language_model.layers.{layer}.{end}" for layer in range(2) for end in sorted([*MLP, *ATTENTION])
    ]


def test_serving_does_not_take_a_model_that_also_sees(tmp_path: Path):
    """transformers names its modules otherwise than its checkpoint does, and an adapter's names are checked there."""
    _, base = published(make_gemma_that_sees(), tmp_path)
    with pytest.raises(AdapterRejected, match="does not have"):
        validate_adapter(tmp_path, "agent@1", base)


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
