"""Which calls may be answered again: those whose whole prompt is known, whoever answered and however it was sampled."""

from __future__ import annotations

from art_patch.types import Call

_NO_REASON_AGAINST = frozenset(
    {
        None,
        "answered by upstream",
        "greedy sampling has no exploration",
        "top_p cuts the distribution",
        "top_k cuts the distribution",
        "min_p cuts the distribution",
        "presence_penalty shifts the distribution",
        "frequency_penalty shifts the distribution",
        "repetition_penalty shifts the distribution",
        "token ids are missing",
        "log-probabilities are missing",
        "prompt token ids are missing",
    }
)
"""Why a call cannot be trained on (`proof.REASONS`) that speaks of its answer alone."""


def can_be_asked_again(call: Call) -> bool:
    """Whether other answers to the call's prompt can be compared with its own."""
    return call.api != "completions" and bool(call.choices) and call.untrainable in _NO_REASON_AGAINST
