"""What litellm knows of a judge without asking anybody: how long a prompt is, how much it may be, what it costs."""

from __future__ import annotations

import contextlib
from typing import Any

from art_patch.rewards.judge.client import load_litellm

ASSUMED_CONTEXT = 100_000
"""Prompt tokens that a judge is taken to read where litellm does not know it."""
_ANSWER_ROOM = 8_192
"""Tokens of a judge's context that are kept free for its answer and for a repair try."""


def count_tokens(model: str, text: str) -> int:
    """Return how many tokens the text is, by the tokenizer that litellm has at hand for the model.

    An estimate where that is not the model's own one.
    """
    return load_litellm().token_counter(model=model, text=text)


def context_tokens(model: str) -> int:
    """Return how many prompt tokens the model may be sent."""
    with contextlib.suppress(Exception):  # litellm raises a bare Exception for a model that it does not know
        known: Any = load_litellm().get_model_info(model).get("max_input_tokens")
        if known:
            return max(known - _ANSWER_ROOM, known // 2)
    return ASSUMED_CONTEXT


def price_usd(model: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return what such a request costs by litellm's price list; `None` if the model is not in it."""
    try:
        prompt_usd, completion_usd = load_litellm().cost_per_token(
            model=model, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
        )
    except Exception:  # the same
        return None
    return prompt_usd + completion_usd
