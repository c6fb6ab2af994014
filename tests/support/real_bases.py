"""The bases that people serve, as their makers configured them, with fewer and smaller layers and random weights.

Every field of a published configuration that is not a size is here, where it differs from what transformers takes by
default. So layers have the kinds, names, norms, windows and rotary embeddings of the real checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tests.support.tiny import make_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM computes on a CPU
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,  # larger than usual, so that distributions are far from uniform
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, **_EXPERTS,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}

_EYE: dict[str, Any] = {
    "image_size": 28, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4,
}  # fmt: skip
_QWEN_EYE = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64, "depth": 1}
_QWEN_3_EYE = {**_QWEN_EYE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


class Base(NamedTuple):
    """A checkpoint whose configuration was shrunk."""

    like: str  # the published checkpoint
    model_type: str
    text: dict[str, Any]  # fields of the part that writes, besides the sizes
    vision: dict[str, Any] | None = None  # of the part that sees
    own: dict[str, Any] = {}  # noqa: RUF012 - never changed; fields of the whole


BASES: dict[str, Base] = {
    "Qwen 2.5": Base(
        "Qwen2.5-7B-Instruct",
        "qwen2",
        {"hidden_size": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "Qwen 3": Base("Qwen3-8B", "qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen 3.5": Base(
        "Qwen3.5-9B",
        "qwen3_5",
        {
            **_LINEAR,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
        _QWEN_3_EYE,
    ),
    "Qwen 3 VL": Base(
        "Qwen3-VL-8B-Instruct",
        "qwen3_vl",
        {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [6, 5, 5],
            },
        },
        _QWEN_3_EYE,
    ),
    "Qwen 3 MoE": Base("Qwen3-30B-A3B", "qwen3_moe", {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "Qwen 3 Next": Base(
        "Qwen3-Next-80B-A3B-Instruct",
        "qwen3_next",
        {**_EXPERTS, **_LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "Llama 3.2": Base(
        "Llama-3.2-3B-Instruct",
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
            },
        },
    ),
    "Llama 4": Base(
        "Llama-4-Scout-17B-16E-Instruct",
        "llama4",
        {
            "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "intermediate_size_mlp": 96,
            "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True,
        },
        {**_EYE, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "Gemma 3": Base(
        "gemma-3-4b-it", "gemma3", {"num_hidden_layers": 6, "sliding_window": 16, "query_pre_attn_scalar": 32}, _EYE
    ),
    "Gemma 4": Base(
        "gemma-4-E4B-it",
        "gemma4",
        {
            "num_hidden_layers": 6, "sliding_window": 16, "global_head_dim": 64, "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512, "num_kv_shared_layers": 0,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        },
        {**_EYE, "num_key_value_heads": 4, "head_dim": 8},
    ),
    "Mistral 3": Base(
        "Mistral-Small-3.1-24B-Instruct-2503",
        "mistral3",
        {"model_type": "mistral", "rope_parameters": {"rope_type": "default", "rope_theta": 1e9}},
        {**_EYE, "head_dim": 8, "model_type": "pixtral"},
    ),
    "gpt-oss": Base(
        "gpt-oss-20b",
        "gpt_oss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 32,
            },
        },
    ),
    "DeepSeek V3": Base(
        "DeepSeek-V3",
        "deepseek_v3",
        {**_LATENT, "rope_parameters": {**_YARN, "rope_theta": 1e4, "original_max_position_embeddings": 32}},
    ),
    # Its makers call the architecture of DeepSeek V3 by a name of their own, which transformers does not know.
    "Kimi K2": Base(
        "Kimi-K2-Instruct",
        "kimi_k2",
        {
            **_LATENT, "n_group": 1, "routed_scaling_factor": 2.827,
            "rope_parameters": {**_YARN, "factor": 32.0, "rope_theta": 5e4, "original_max_position_embeddings": 32},
        },
    ),
}  # fmt: skip


def config_of(name: str, **special: int | None) -> Any:
    """Return the shrunk configuration; `special` are ids of special tokens."""
    import transformers

    base = BASES[name]
    text = {**_SIZES, **special, **base.text}
    kind = "deepseek_v3" if base.model_type == "kimi_k2" else base.model_type
    fields = text if base.vision is None else {"text_config": text, "vision_config": base.vision, **special, **base.own}
    return transformers.AutoConfig.for_model(kind, dtype="float32", **fields)


def make_base(name: str, directory: Path) -> Path:
    """Write the checkpoint with a tokenizer, as its makers would have; return its directory."""
    import torch
    import transformers

    base = BASES[name]
    tokenizer = make_tokenizer(_SIZES["vocab_size"])
    config = config_of(
        name, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    auto = transformers.AutoModelForCausalLM if base.vision is None else transformers.AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto.from_config(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if config.model_type != base.model_type:
        path = directory / "config.json"
        content = path.read_text()
        path.write_text(content.replace(f'"model_type": "{config.model_type}"', f'"model_type": "{base.model_type}"'))
    return directory
