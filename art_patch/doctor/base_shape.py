"""Counts the weights of a base model, and what a token of it needs, from its `config.json` alone.

Nothing else of a checkpoint is read, and neither torch nor transformers is imported. The fields are those of Hugging
Face. Fields that a published config leaves out because they are the defaults of its architecture are in `_DEFAULTS`.
The counts are exact for the layers that the table of families names, and near for parts that see or hear.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from art_patch.errors import ConfigError, ModelNotFound
from art_patch.training import family_of

_Config = Mapping[str, Any]
_QK_NORM = ("qwen3", "gemma3", "gemma4", "llama4", "qwen3_5", "olmo2")  # how a `model_type` begins
_FOUR_NORMS = ("gemma2", "gemma3", "gemma4")  # a norm before and after attention and MLP
# What transformers and vLLM take where a config does not say it.
_DEFAULTS: Mapping[str, _Config] = {
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3": {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
    "gemma4": {
        "vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    },
    "gpt_oss": {"head_dim": 64},
    "llama4": {"intermediate_size_mlp": 16_384, "head_dim": 128, "interleave_moe_layer_step": 1},
    "mistral3": {"head_dim": 128, "vocab_size": 131_072},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """A block of the model: attention, or what stands in its place, and an MLP."""

    adapted: tuple[tuple[int, int], ...]  # inputs and outputs of each linear layer that gets a LoRA
    weights: int  # all weights of the block
    # Values that each token keeps until the backward pass: in the precision of the model, and in float32.
    kept: int
    kept_fp32: int
    attention: int  # values a token has in queries, keys, values and outputs together
    mlp: int  # width between the products of its MLP, of all experts that compute a token
    cached: int  # values a token has in the KV cache of an engine


@dataclass(frozen=True, slots=True)
class BaseShape:
    """The sizes of a base model."""

    model_type: str
    layers: tuple[Layer, ...]
    width: int
    vocabulary: int
    context: int  # most tokens of prompt and answer
    weights: int  # all of the checkpoint
    looked_up: int  # of these, embeddings that are no head too: of them a step reads the rows of its tokens alone
    checkpoint_bytes: int  # bytes of a weight in the checkpoint

    @property
    def adapted(self) -> int:
        """The number of weights in layers that get a LoRA, which `base_bits` packs."""
        return sum(rows * columns for layer in self.layers for rows, columns in layer.adapted)

    def lora(self, rank: int) -> int:
        """Returns the number of weights of a LoRA."""
        return rank * sum(rows + columns for layer in self.layers for rows, columns in layer.adapted)


def read_shape(base: str) -> BaseShape:
    """Returns the sizes of a base: a model directory, its `config.json`, or a Hugging Face id.

    Raises `ModelNotFound` without a readable config, and `ConfigError` if the config lacks a size.
    """
    path = Path(base).expanduser()
    if path.is_dir():
        path /= "config.json"
    elif not path.is_file():
        path = _from_hub(base)
    try:
        config: Any = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("not an object")
        return shape_of(cast("_Config", config))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is missing or broken ({error}); give a directory with a config.json") from error


def _from_hub(base: str) -> Path:
    cure = "give a directory with its config.json, or that file"
    if Path(base).is_absolute() or base.startswith((".", "~")):
        raise ModelNotFound(f"there is no {base}; {cure}")
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(base, "config.json"))
    except Exception as error:  # not installed, offline, no such id, no access: the hub raises a dozen types
        why = " ".join(str(error).split())[:200]
        raise ModelNotFound(f"{base} is no directory, and cannot be had from the hub ({why}); {cure}") from error


def shape_of(config: _Config) -> BaseShape:
    """Returns the sizes of the model of a config; raises `ConfigError` if it lacks one."""
    kind = str(config.get("model_type", ""))
    inner: Any = config.get("text_config")
    text: _Config = {**config, **inner} if isinstance(inner, dict) else config
    text = {**next((known for name, known in _DEFAULTS.items() if kind.startswith(name)), {}), **text}
    try:
        layers = tuple(_layer(kind, text, index) for index in range(text["num_hidden_layers"]))
        width, vocabulary = text["hidden_size"], text["vocab_size"]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the config of this {kind or 'model'} does not say {error}: its memory is not known"
        ) from error
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    own = text.get("hidden_size_per_layer_input") or 0
    own *= (text.get("vocab_size_per_layer_input", 0) + width) * len(layers)
    weights = sum(layer.weights for layer in layers) + vocabulary * width * (1 if tied else 2) + width + own
    weights += sum(_sense(config[name], width) for name in ("vision_config", "audio_config") if config.get(name))
    said = str(config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype"))
    context = int(text.get("max_position_embeddings", 32_768))
    looked_up = 0 if tied else vocabulary * width
    return BaseShape(kind, layers, width, vocabulary, context, weights, looked_up, 4 if "float32" in said else 2)


def _layer(kind: str, text: _Config, index: int) -> Layer:
    own: Any = text.get("per_layer_config")
    text = {**text, **own.get(str(index), {})} if isinstance(own, dict) else text
    width = text["hidden_size"]
    linear, weights, attention, kept, cached = _attention(kind, text, index)
    mlp, mlp_weights, between = _mlp(text, index)
    norms = 4 if kind.startswith(_FOUR_NORMS) else 2
    # What each part reads comes from a norm, which keeps its input as float32 and gives an output of its own.
    targets = family_of("deepseek_v3" if kind == "kimi_k2" else kind).targets
    adapted = (*linear, *mlp) if not targets or any("mlp." in target for target in targets) else linear
    normed = text["num_attention_heads"] + _kv_heads(text) if kind.startswith(_QK_NORM) else 0
    beside = 2 * width * (text.get("hidden_size_per_layer_input") or 0)  # of Gemma 4's embeddings for each layer
    kept_fp32 = norms * width + normed * _head(text) + text["num_attention_heads"]
    return Layer(
        adapted=adapted,
        weights=weights + mlp_weights + norms * width + (2 * _head(text) if normed else 0) + beside,
        kept=2 * width + kept + 4 * between,
        kept_fp32=kept_fp32,
        attention=attention,
        mlp=between,
        cached=cached,
    )


def _head(text: _Config) -> int:
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _kv_heads(text: _Config) -> int:
    return text.get("num_key_value_heads") or text["num_attention_heads"]


def _attention(kind: str, text: _Config, index: int) -> tuple[tuple[tuple[int, int], ...], int, int, int, int]:
    """Returns layers with a LoRA, weights, width of all parts, values kept for a token, and values in its cache."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    kinds: Any = text.get("layer_types")
    here = kinds[index] if isinstance(kinds, list) and index < len(kinds) else _kind_by_interval(text, index)
    if here == "linear_attention":
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        small = text["linear_num_value_heads"]
        linear = (
            ((width, 2 * keys + 2 * values), (width, 2 * small), (values, width))
            if kind.startswith("qwen3_next")
            else ((width, 2 * keys + values), (width, values), (width, small), (width, small), (values, width))
        )
        conv = (2 * keys + values) * text.get("linear_conv_kernel_dim", 4)
        both = 2 * keys + 2 * values
        # Torch's own delta rule, which is used where no kernel is installed, keeps its chunks in float32.
        return linear, _count(linear) + conv, both, 12 * both, 0
    if (rank := text.get("kv_lora_rank")) is not None:
        plain, turned, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
        queries, values = heads * (plain + turned), heads * value
        packed = text.get("q_lora_rank")
        ask = ((width, packed), (packed, queries)) if packed else ((width, queries),)
        linear = (*ask, (width, rank + turned), (values, width))
        weights = _count(linear) + rank * heads * (plain + value)
        return linear, weights, 2 * queries + 2 * values, 2 * queries + 3 * values + rank, rank + turned
    whole = here == "full_attention" and text.get("global_head_dim")
    head = text["global_head_dim"] if whole else _head(text)
    queries, keys = heads * head, _kv_heads(text) * head
    if index >= text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0):  # keys and values of a layer below
        linear = ((width, queries), (queries, width))
        return linear, _count(linear), 2 * queries + 2 * keys, 3 * queries, 0
    gates = 2 if kind.startswith(("qwen3_next", "qwen3_5")) else 1  # queries stand beside a gate for the output
    linear = ((width, gates * queries), (width, keys), (width, keys), (queries, width))
    # Queries, the output, and the output as the last product reads it; keys and values.
    return linear, _count(linear), 2 * queries + 2 * keys, (2 + gates) * queries + 2 * keys, 2 * keys


def _kind_by_interval(text: _Config, index: int) -> str:
    every = text.get("full_attention_interval", 1 if "linear_num_key_heads" not in text else 4)
    return "full_attention" if (index + 1) % every == 0 else "linear_attention"


def _mlp(text: _Config, index: int) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """Returns the linear layers of a dense MLP, all weights, and the width that a token computes."""
    width = text["hidden_size"]
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0
    if experts and not _is_dense(text, index):
        inner = text.get("moe_intermediate_size") or text["intermediate_size"]
        shared = text.get("shared_expert_intermediate_size") or inner * (text.get("n_shared_experts") or 0)
        if "interleave_moe_layer_step" in text:
            shared = inner  # Llama 4 has one beside the routed ones
        weights = experts * 3 * width * inner + 3 * width * shared + experts * width
        return (), weights, inner * text.get("num_experts_per_tok", 1) + shared
    inner = text.get("intermediate_size_mlp") if experts else text["intermediate_size"]
    inner = inner or text["intermediate_size"]
    linear = ((width, inner), (width, inner), (inner, width))
    return linear, _count(linear), inner


def _is_dense(text: _Config, index: int) -> bool:
    every = text.get("interleave_moe_layer_step") or text.get("decoder_sparse_step") or 1
    first = text.get("first_k_dense_replace") or 0
    return index < first or index in (text.get("mlp_only_layers") or ()) or (index + 1) % every != 0


def _sense(config: _Config, into: int) -> int:
    width = config.get("hidden_size") or config.get("embed_dim") or 1024
    depth = config.get("num_hidden_layers") or config.get("depth") or config.get("num_layers") or 24
    inner = config.get("intermediate_size") or 4 * width
    return depth * (4 * width * width + 2 * width * inner) + 4 * width * into + 4 * width * width


def _count(linear: tuple[tuple[int, int], ...]) -> int:
    return sum(map(math.prod, linear))
