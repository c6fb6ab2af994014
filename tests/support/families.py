"""Tiny random models of each family, with a LoRA and without; and models that the trainer refuses."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch

from art_patch.training.families import family_of, target_names

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


HYBRID: dict[str, Any] = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


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
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "qwen3_next": {
        **EXPERTS,
        **HYBRID,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
    "granitemoe": {"num_local_experts": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
}


_EYE: dict[str, Any] = {
    "image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4,
}  # fmt: skip
_QWEN_EYE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32, "depth": 1,
}  # fmt: skip
_QWEN_3_EYE = {**_QWEN_EYE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_THREE_AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

SEEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"head_dim": 8, "sliding_window": 4}, _EYE),
    "gemma4": (
        {
            "head_dim": 8, "global_head_dim": 8, "sliding_window": 4, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0, "num_global_key_value_heads": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {**_EYE, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "qwen2_5_vl": ({"rope_parameters": _THREE_AXES}, _QWEN_EYE),
    "qwen3_vl": ({"head_dim": 8, "rope_parameters": {**_THREE_AXES, "mrope_interleaved": True}}, _QWEN_3_EYE),
    "qwen3_5": (HYBRID, _QWEN_3_EYE),
    "mistral3": ({"head_dim": 8, "model_type": "mistral"}, {**_EYE, "head_dim": 8, "model_type": "pixtral"}),
    "llama4": (
        {
            "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1,
            "attention_chunk_size": 64, "interleave_moe_layer_step": 2,
        },
        {**_EYE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}  # fmt: skip
"""Models that also see: what their text parts have beyond `SIZE`, and their vision parts."""


def make_model(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZE, **CONFIGS.get(model_type, {}), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def logits_of(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V) by transformers alone, which cannot run all of Llama 4 (5.24) without a picture."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = getattr(getattr(whole, "config", None), "model_type", None)
    return (whole.language_model if kind == "llama4" else model)(input_ids=ids_BT).logits


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


def is_computed(model_type: str) -> bool:
    """Whether the transformers that is installed computes this family."""
    return tuple(map(int, version("transformers").split(".")[:2])) >= family_of(model_type).since


def make_model_that_sees(model_type: str, **text: Any) -> Any:
    """A tiny model that also sees, whole, as its makers publish it."""
    import transformers

    if not is_computed(model_type):
        pytest.skip(f"transformers {version('transformers')} is older than {model_type}")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, text_config={**SIZE, **SEEING[model_type][0], **text}, vision_config=SEEING[model_type][1]
    )
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


def _make_llava() -> Any:
    """Its checkpoint has other names than transformers, and nobody has tried to serve it."""
    import transformers

    config = transformers.LlavaConfig(
        text_config={**SIZE, "model_type": "llama"}, vision_config={**_EYE, "model_type": "clip_vision_model"}
    )
    return transformers.LlavaForConditionalGeneration(config)


def _make_qwen_that_hears() -> Any:
    import transformers

    hears = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "num_mel_bins": 8}
    config = transformers.Qwen2AudioConfig(text_config={**SIZE, "model_type": "qwen2"}, audio_config=hears)
    return transformers.Qwen2AudioForConditionalGeneration(config)


REFUSED = {
    "llava": (_make_llava, r"no model\.language_model\.layers\.0\.mlp\.down_proj, .* and 11 more"),
    "qwen2_audio": (_make_qwen_that_hears, "Qwen2AudioConfig.* for this kind of AutoModel"),
}
"""Models that also see or hear, of which no LoRA could be served, and words of what is said of them."""
