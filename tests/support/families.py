"""Tiny random models of each family, with a LoRA and without; and models that the trainer refuses."""

from __future__ import annotations

from typing import Any

import torch

from art_patch.training.families import target_names

SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}


EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}

LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}

DEEPSEEK = {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "num_experts": 4},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 8, "n_group": 2, "topk_group": 1},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    # of no family
    "phi3": {},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
    "granitemoe": {"num_local_experts": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
}


def make_model(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZE, **CONFIGS.get(model_type, {}), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def with_lora(model: Any) -> Any:
    """A LoRA where the table says, `B` not zero, or `A` would have no gradient."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=target_names(model), task_type="CAUSAL_LM")
    tuned = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1)
    return tuned.eval()


def make_gemma_that_sees() -> Any:
    vision = {"image_size": 28, "patch_size": 14, **{key: SIZE[key] for key in ("hidden_size", "num_hidden_layers")}}
    return make_model(
        "gemma3",
        text_config={**SIZE, "head_dim": 8},
        vision_config={**vision, "intermediate_size": 48, "num_attention_heads": 4},
    )


def make_qwen_that_sees(kind: str, **text: Any) -> Any:
    """A tiny model that also sees, as its makers publish it."""
    import transformers

    sees = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "depth": 1}
    vision = {**sees, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = transformers.AutoConfig.for_model(kind, text_config={**SIZE, "head_dim": 8, **text}, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


REFUSED = {
    "gemma3": (make_gemma_that_sees, r"no model\.language_model\.layers\.0\.mlp\.down_proj, .* and 11 more"),
    "qwen3_5": (
        lambda: make_qwen_that_sees(
            "qwen3_5", linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
        ),
        r"no model\.layers\.0\.linear_attn\.in_proj_a, .* and \d+ more",
    ),
    "qwen3_vl": (lambda: make_qwen_that_sees("qwen3_vl"), "Qwen3VLConfig.* for this kind of AutoModel"),
}
