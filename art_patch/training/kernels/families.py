"""Model families: one table of what the trainer must know of an architecture, looked up by `config.model_type`.

A LoRA is put on attention and dense MLPs, never on routers, the language head or embeddings. In mixtures of experts it
is put on attention alone. Routed experts are fused three-dimensional parameters in transformers 5, for which our
engines serve no LoRA. Loads no torch until a model is at hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from art_patch.errors import TrainingError

_NUMBER = re.compile(r"^\d+\.")
_IN_A_BLOCK = re.compile(r"\.\d+\.")
# Shared experts and dense layers of a mixture of experts could have a LoRA. But peft 0.21 takes every layer of these
# names for a routed expert's, whatever stands before the name (`_convert_peft_config_moe`), and would train those
# instead. It overlooks Qwen 2, whose shared expert is trained.
_TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
_ROUTER = re.compile(r"(^|\.)(gate|\w*router\w*|\w+_gate)(\.|$)")


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags that chat templates write before a model's thoughts, and between the thoughts and the answer."""

    open: str
    close: str


# As Qwen 3 and DeepSeek write it. Models without thoughts never meet it.
THINK = Thinking("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same names of layers and the same conventions in their chat templates.

    Attributes:
        name: Name of the family, for people.
        model_types: The values of `config.model_type` that belong to it.
        targets: Ends of the names of modules that get a LoRA. Empty means every linear layer of the blocks but routers.
        end_of_turn: Tokens that end an answer; the tokenizer's own end-of-sequence token ends one too.
        thinking: Tags around thoughts, if the chat templates know any. Such templates leave the thoughts of earlier
            answers out, so the prompt of the next turn does not extend this one.
    """

    name: str
    model_types: tuple[str, ...]
    targets: tuple[str, ...]
    end_of_turn: tuple[str, ...] = ()
    thinking: Thinking | None = None


# Two parts in each name: a checkpoint keeps routed experts apart as `experts.0.gate_proj`, and the check of an adapter
# against the checkpoint would take those for `mlp.gate_proj` if it compared the last part alone.
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_LATENT_ATTENTION = (
    "self_attn.q_proj",  # where queries are not compressed
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    # Not kv_b_proj: vLLM folds its weight into two others when it loads, and a LoRA on it would not act in decoding.
    "self_attn.o_proj",
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "Qwen 2.5",
        ("qwen2",),
        (*_ATTENTION, *_MLP),
        end_of_turn=("<|im_end|>",),
        thinking=THINK,  # QwQ and what DeepSeek R1 was distilled into
    ),
    Family(
        "Qwen 1.5 and 2 MoE",
        ("qwen2_moe",),
        (*_ATTENTION, "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
        end_of_turn=("<|im_end|>",),
    ),
    Family(
        "Qwen 3",
        ("qwen3",),
        (*_ATTENTION, *_MLP),
        end_of_turn=("<|im_end|>",),
        thinking=THINK,
    ),
    Family(
        "Qwen 3 MoE",
        ("qwen3_moe",),
        _ATTENTION,
        end_of_turn=("<|im_end|>",),
        thinking=THINK,
    ),
    Family(
        "Llama 3 and Mistral",
        ("llama", "mistral"),
        (*_ATTENTION, *_MLP),
        end_of_turn=("<|eot_id|>", "<|eom_id|>"),
        thinking=THINK,  # what DeepSeek R1 was distilled into
    ),
    Family(
        "DeepSeek V2 and V3",
        ("deepseek_v2", "deepseek_v3"),  # Kimi's models are of the latter make
        _LATENT_ATTENTION,
        end_of_turn=("<|im_end|>",),  # Kimi's
        thinking=THINK,
    ),
    Family("Gemma 2", ("gemma2",), (*_ATTENTION, *_MLP), end_of_turn=("<end_of_turn>",)),
    Family(
        "Gemma 3",
        ("gemma3_text", "gemma3"),
        (*_ATTENTION, *_MLP),
        end_of_turn=("<end_of_turn>",),
    ),
)

# Of every other model that `AutoModelForCausalLM` loads.
DEFAULT = Family("any other", (), (), thinking=THINK)

_BY_TYPE: Mapping[str, Family] = MappingProxyType({kind: family for family in FAMILIES for kind in family.model_types})


def family_of(model_type: str) -> Family:
    """Returns the family of a `config.model_type`, or `DEFAULT`."""
    return _BY_TYPE.get(model_type, DEFAULT)


def target_names(model: Any) -> list[str]:
    """Returns peft's `target_modules` for a causal language model of transformers that has no LoRA yet.

    These are ends of module names if the ends select exactly the wanted layers, else whole names. Of a model that also
    sees or hears, only the language part is trained.

    Raises:
        TrainingError: There is no linear layer to put a LoRA on.
    """
    linear = linear_names(model)
    targets = family_of(model.config.model_type).targets
    if targets:
        chosen = {name for name in linear if _ends_with_any(name, targets)}
    else:
        chosen = {name for name in linear if not (_has_experts(model) and name.endswith(_TAKEN_FOR_EXPERTS))}
    if not chosen:
        raise TrainingError(
            f"a {model.config.model_type} has no linear layer that a LoRA can be put on; train another base model"
        )
    ends = {_NUMBER.sub("", ".".join(name.split(".")[-2:])) for name in chosen}
    exact = {name for name, _ in model.named_modules() if _ends_with_any(name, tuple(ends))} == chosen
    return sorted(ends if exact else chosen)


def linear_names(model: Any) -> list[str]:
    """Returns the whole name of every linear layer in the decoder's blocks, without head and routers."""
    import torch  # takes seconds, and the table alone does not need it

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and name.startswith(prefix)
        and _IN_A_BLOCK.search(name)
        and not _ROUTER.search(name)
    ]


def _has_experts(model: Any) -> bool:
    return any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())


def _ends_with_any(name: str, ends: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)
