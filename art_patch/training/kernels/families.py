"""What the trainer must know of a model's architecture: one table of data, looked up by `config.model_type`.

A LoRA is put on attention and dense MLPs; never on routers, the language head or embeddings. vLLM 0.32 takes one for
every linear layer; what is left out for its sake says so at its line.

In mixtures of experts it is put on attention. Routed experts are fused three-dimensional parameters in transformers 5,
which our engines serve no LoRA for. Shared experts and dense layers beside them could have one, but peft 0.21 takes
every `gate_proj`, `up_proj` and `down_proj` of such a model for those of its routed experts, whatever stands before the
name (`_convert_peft_config_moe`), and would train these instead. It overlooks Qwen 2, whose shared expert is trained.

Names of targets have two parts, `mlp.gate_proj`: a checkpoint keeps the routed experts apart as `experts.0.gate_proj`,
and who checks an adapter against the checkpoint by the last part alone would miss them.
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
_TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")
_ROUTER = re.compile(r"(^|\.)(gate|\w*router\w*|\w+_gate)(\.|$)")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What chat templates write around thoughts.

    Attributes:
        open: before them.
        close: after them, before the answer.
    """

    open: str
    close: str


THINK = Thinking("<think>\n", "\n</think>\n\n")
"""As Qwen 3 and DeepSeek write it; models without thoughts never meet it."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one make.

    Attributes:
        name: for people.
        model_types: `config.model_type` of each.
        targets: ends of the names of modules that get a LoRA; empty means every linear layer of the blocks but routers.
        end_of_turn: tokens that end an answer; the tokenizer's own end-of-sequence token does so too.
        thinking: tags around thoughts, if its templates know any.
        strips_thinking: templates leave the thoughts of earlier answers out, so a next prompt does not extend this one.
    """

    name: str
    model_types: tuple[str, ...]
    targets: tuple[str, ...]
    end_of_turn: tuple[str, ...] = ()
    thinking: Thinking | None = None
    strips_thinking: bool = False


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
        strips_thinking=True,
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
        strips_thinking=True,
    ),
    Family(
        "Qwen 3 MoE",
        ("qwen3_moe",),
        _ATTENTION,
        end_of_turn=("<|im_end|>",),
        thinking=THINK,
        strips_thinking=True,
    ),
    Family(
        "Llama 3 and Mistral",
        ("llama", "mistral"),
        (*_ATTENTION, *_MLP),
        end_of_turn=("<|eot_id|>", "<|eom_id|>"),
        thinking=THINK,  # what DeepSeek R1 was distilled into
        strips_thinking=True,
    ),
    Family(
        "DeepSeek V2 and V3",
        ("deepseek_v2", "deepseek_v3"),  # Kimi's models are of the latter make
        _LATENT_ATTENTION,
        end_of_turn=("<|im_end|>",),  # Kimi's
        thinking=THINK,
        strips_thinking=True,
    ),
    Family("Gemma 2", ("gemma2",), (*_ATTENTION, *_MLP), end_of_turn=("<end_of_turn>",)),
    Family(
        "Gemma 3",
        ("gemma3_text", "gemma3"),
        (*_ATTENTION, *_MLP),
        end_of_turn=("<end_of_turn>",),
    ),
)

DEFAULT = Family("any other", (), (), thinking=THINK, strips_thinking=True)
"""Whatever `AutoModelForCausalLM` loads."""

_BY_TYPE: Mapping[str, Family] = MappingProxyType({kind: family for family in FAMILIES for kind in family.model_types})


def family_of(model_type: str) -> Family:
    """Return the family of a `config.model_type`, `DEFAULT` if it is in none."""
    return _BY_TYPE.get(model_type, DEFAULT)


def target_names(model: Any) -> list[str]:
    """Return what to give peft as `target_modules`: ends of module names if they say it exactly, else whole names.

    Args:
        model: a causal language model of transformers, without a LoRA. Of one that also sees or hears, only the part
            that writes is trained.

    Raises:
        TrainingError: there is no linear layer to put a LoRA on.
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
    """Return the whole name of every linear layer in the blocks of the decoder; neither head nor routers."""
    import torch  # takes seconds; the table alone does not need it

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
