"""Files of a model that leaves the project: which of a base go along, which names are ours to write and delete."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Of merged weights; `auto` is the base's own."""

README = "README.md"
BESIDE_WEIGHTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Of a base, what a merged model takes over as it is."""

_WRITTEN = frozenset({README, "config.json", "adapter_config.json", *BESIDE_WEIGHTS})
_WEIGHTS = (".safetensors", ".safetensors.index.json")


def is_ours(name: str) -> bool:
    """Whether a file of this name, at the top of a repository, is one that a copy of a policy has."""
    return "/" not in name and (name in _WRITTEN or name.endswith(_WEIGHTS))
