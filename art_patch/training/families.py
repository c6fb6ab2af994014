"""Model families: a table of the facts about each architecture that the trainer needs, found by `config.model_type`.

A family's entry names the layers that get a LoRA, the tokens that end an answer, and the tags around thoughts. The
linear layers of attention and of dense MLPs get a LoRA. Routers, the language head and embeddings never get one. In
most mixture-of-experts models only the attention layers get one: their experts are fused three-dimensional parameters
in transformers 5. By its source vLLM 0.32 serves a LoRA on these, for gpt-oss and Qwen 3 VL MoE in PEFT's layout, and
for Qwen 3 MoE and DeepSeek as one of each expert. Here the check of adapters and the embedded engine know linear layers
alone, and vLLM computes experts with Triton, so nothing of it could be tried without a GPU.

Importing this module does not load torch. Only the functions that take a model do.
"""

import re
from dataclasses import dataclass
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
    """The tags that chat templates write around a model's thoughts."""

    open: str  # the text that a template writes before the thoughts
    close: str  # the text that a template writes between the thoughts and the answer


# As Qwen 3 and DeepSeek write it. Models without thoughts never meet it.
THINK = Thinking("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True, slots=True)
class Family:
    """Models that have the same layer names and follow the same conventions in their chat templates."""

    name: str  # name of the family, which people read
    model_types: tuple[str, ...]  # the values of `config.model_type` that belong to the family
    # Endings of the names of modules that get a LoRA. If empty, all linear layers of the blocks but routers get one.
    targets: tuple[str, ...]
    end_of_turn: tuple[str, ...] = ()  # tokens that end an answer, besides the tokenizer's own end-of-sequence token
    # Tags around thoughts; `None` if the chat templates use none. Templates with such tags remove the thoughts of
    # earlier answers, so the prompt of the next turn does not begin with the tokens of this turn.
    thinking: Thinking | None = None
    since: tuple[int, int] = (0, 0)  # the first release of transformers that computes it


# Two parts in each name: a checkpoint keeps routed experts apart as `experts.0.gate_proj`, and the check of an adapter
# against the checkpoint would take those for `mlp.gate_proj` if it compared the last part alone.
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_DENSE = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_SHARED_EXPERT = ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
_LATENT_ATTENTION = (
    "self_attn.q_proj",  # where queries are not compressed
    "self_attn.q_a_proj",
    "self_attn.q_b_proj",
    "self_attn.kv_a_proj_with_mqa",
    # Not kv_b_proj: vLLM folds its weight into two others when it loads, and a LoRA on it would not act in decoding.
    "self_attn.o_proj",
)

_LINEAR_ATTENTION = (
    "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a",  # Qwen 3.5
    "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba",  # the same, fused, in Qwen 3 Next
    "linear_attn.out_proj",
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    # Of these, QwQ and what DeepSeek R1 was distilled into have thoughts.
    Family("Qwen 2.5", ("qwen2", "qwen2_vl", "qwen2_5_vl"), _DENSE, ("<|im_end|>",), THINK),
    Family("Qwen 1.5 and 2 MoE", ("qwen2_moe",), (*_ATTENTION, *_SHARED_EXPERT), ("<|im_end|>",)),
    Family("Qwen 3", ("qwen3", "qwen3_vl"), _DENSE, ("<|im_end|>",), THINK),
    Family("Qwen 3 MoE", ("qwen3_moe", "qwen3_vl_moe"), _ATTENTION, ("<|im_end|>",), THINK),
    # Three of four layers have linear attention, whose projections get a LoRA, too.
    Family("Qwen 3.5", ("qwen3_5", "qwen3_5_text"), (*_DENSE, *_LINEAR_ATTENTION), ("<|im_end|>",), THINK, (5, 2)),
    Family("Qwen 3 Next", ("qwen3_next",), (*_ATTENTION, *_LINEAR_ATTENTION), ("<|im_end|>",), THINK),
    # Of these, what DeepSeek R1 was distilled into has thoughts.
    Family("Llama 3 and Mistral", ("llama", "mistral", "mistral3"), _DENSE, ("<|eot_id|>", "<|eom_id|>"), THINK),
    Family("Llama 4", ("llama4", "llama4_text"), _ATTENTION, ("<|eot|>", "<|eom|>"), since=(5, 2)),
    # Kimi's models are of the make `deepseek_v3`, and the end of turn is theirs.
    Family("DeepSeek V2 and V3", ("deepseek_v2", "deepseek_v3"), _LATENT_ATTENTION, ("<|im_end|>",), THINK),
    Family("Gemma 2", ("gemma2",), _DENSE, ("<end_of_turn>",)),
    Family("Gemma 3", ("gemma3_text", "gemma3"), _DENSE, ("<end_of_turn>",)),
    Family("Gemma 4", ("gemma4_text", "gemma4"), _DENSE, ("<turn|>",), since=(5, 5)),
    # An answer ends with `<|return|>`, or with a call of a tool.
    Family("gpt-oss", ("gpt_oss",), _ATTENTION, ("<|return|>", "<|call|>")),
)

# Of every other model that `AutoModelForCausalLM` loads.
DEFAULT = Family("any other", (), (), thinking=THINK)

_BY_TYPE = {kind: family for family in FAMILIES for kind in family.model_types}


def family_of(model_type: str) -> Family:
    """Returns the family that a `config.model_type` belongs to; `DEFAULT` if no family lists it."""
    return _BY_TYPE.get(model_type, DEFAULT)


def target_names(model: Any) -> list[str]:
    """Returns peft's `target_modules` for a causal language model of transformers that has no LoRA yet.

    The result is a list of module-name endings if these match the wanted layers and no others. Otherwise it lists the
    full module names. In a model that also processes images or audio, only layers of the language model are chosen.
    Raises `TrainingError` if no linear layer may get a LoRA.
    """
    linear = linear_names(model)
    targets = family_of(model.config.model_type).targets
    if targets:
        chosen = {name for name in linear if _ends_with_any(name, targets)}
    else:
        experts = any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
        chosen = {name for name in linear if not (experts and name.endswith(_TAKEN_FOR_EXPERTS))}
    if not chosen:
        raise TrainingError(
            f"a {model.config.model_type} has no linear layer that a LoRA can be put on; train another base model"
        )
    ends = {_NUMBER.sub("", ".".join(name.split(".")[-2:])) for name in chosen}
    exact = {name for name, _ in model.named_modules() if _ends_with_any(name, tuple(ends))} == chosen
    return sorted(ends if exact else chosen)


def decoder_of(model: Any) -> Any:
    """Returns the part of a model that turns token ids into hidden states, without the language head."""
    outer, decoder = model, model.get_decoder()
    # transformers 5.24 names the whole language model of Llama 4, head included, and of its text model itself.
    while decoder is outer or getattr(decoder, "lm_head", None) is not None:
        inner = getattr(decoder, "model", None)
        if inner is None:
            raise TrainingError(
                f"{type(model).__name__} has no decoder that transformers can tell: it cannot be trained"
            )
        outer, decoder = None, inner
    return decoder


def linear_names(model: Any) -> list[str]:
    """Returns the full names of all linear layers in the decoder's blocks except routers and the language head."""
    import torch  # takes seconds, and the table alone does not need it

    decoder, head = decoder_of(model), model.get_output_embeddings()
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


def _ends_with_any(name: str, ends: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)
