"""A random Qwen3 small enough for every test, and LoRAs for it.

`make_tiny_model(dir)` writes a complete Hugging Face checkpoint (config, safetensors, byte-level BPE tokenizer, ChatML
template with tools) in about a second; `make_tiny_adapter` publishes a valid PEFT LoRA for it the way the trainer does.
Equal seeds give equal weights. Nothing here is meant to answer sensibly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As in Qwen's own tokenizers these are added tokens but not special ones: decoding must keep them.
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools you may call:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nCall one with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_CORPUS = (
    "the price of apples, plums and pears in the shop is what the customer asks the assistant to look up",
    'Tools you may call: {"type": "function", "function": {"name": "lookup", "description": "Look up an item", '
    '"parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}',
    'Call one with {"name": "lookup", "arguments": {"item": "plum"}}',
    "system user assistant tool what is how many please answer with one number only yes no",
)


def make_tokenizer(vocab_size: int = 512) -> Any:
    """A byte-level BPE tokenizer: any string round-trips, digits are single tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    learned = vocab_size - len(SPECIAL_TOKENS) - len(TOOL_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=learned, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_tiny_model(
    directory: str | Path,
    seed: int = 0,
    *,
    hidden: int = 64,
    layers: int = 2,
    vocab_size: int = 512,
    max_position_embeddings: int = 1024,
    init_scale: float = 0.15,
) -> Path:
    """Writes a random Qwen3 checkpoint and returns its directory.

    Args:
        directory: Created if missing.
        seed: Of the weights.
        hidden: Width; 64 gives about 0.15M parameters, 128 about 0.45M.
        layers: Number of decoder layers.
        vocab_size: Tokens in the tokenizer and rows in the embedding.
        max_position_embeddings: Context length.
        init_scale: Standard deviation of the weights; larger than usual, so that the distributions are far from
            uniform and two policies differ visibly.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocab_size)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM computes on a CPU
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=init_scale,
        dtype="float32",
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    torch.random.set_rng_state(state)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_adapter_files(
    directory: str | Path, base_dir: str | Path, *, seed: int = 1, scale: float = 0.1, rank: int = 4
) -> Path:
    """Writes `adapter_config.json` and `adapter_model.safetensors` (no manifest) for a random LoRA of the base."""
    import torch
    from safetensors.torch import save_file

    from art_patch.policies import read_base_model

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for weight, shape in sorted(read_base_model(base_dir).weight_shapes.items()):
        module = weight.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in targets:
            out_features, in_features = shape
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * scale
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_dir),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return path


def make_tiny_adapter(
    directory: str | Path,
    base_dir: str | Path,
    name: str = "agent",
    step: int = 1,
    seed: int = 1,
    scale: float = 0.1,
    *,
    rank: int = 4,
) -> Path:
    """Publishes a valid random LoRA as `directory/NAME@STEP` and returns that path."""
    from art_patch.policies import base_fingerprint, publish_adapter

    root = Path(directory)
    work = make_adapter_files(root / f".{name}@{step}.tmp", base_dir, seed=seed, scale=scale, rank=rank)
    return publish_adapter(work, root / f"{name}@{step}", base_sha256=base_fingerprint(base_dir))
