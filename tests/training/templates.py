"""Chat templates of real models, as TRL keeps them, on a small tokenizer that any text goes through."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.tiny import make_tokenizer

END: dict[str, str] = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "deepseekv3": "<｜end▁of▁sentence｜>",  # noqa: RUF001
    "glm4moe": "<|endoftext|>",
}
"""What ends an answer, by template."""


def tokenizer_with(template: str) -> Any:
    """The tiny tokenizer with TRL's copy of a real template, and the token that ends its answers."""
    spec = find_spec("trl")  # not imported: it takes seconds
    assert spec is not None and spec.submodule_search_locations is not None
    text = Path(spec.submodule_search_locations[0], "chat_templates", f"{template}.jinja").read_text()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    tokenizer.add_special_tokens({"eos_token": END[template]})
    return tokenizer
