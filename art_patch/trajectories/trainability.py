"""Tells which fields of a request are stored, and whether a call can be trained on; if it cannot, for which reason.

A call is trainable only if it is token-exact: its token ids and log-probabilities come from the server that sampled
them, are complete, and were sampled from the policy's own distribution. Texts are never tokenised again to replace
missing ids, and missing log-probabilities are never estimated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from art_patch.types import UPSTREAM

if TYPE_CHECKING:
    from art_patch.types import Call  # `patch()` imports this module for `PARAMS` and must not make the class

# Parameters of a Responses call that refer to what the provider adds to the prompt.
KEPT_BY_PROVIDER = frozenset({"conversation", "previous_response_id", "prompt"})

KNOWN_ENDS = frozenset({"stop", "length", "tool_calls", "function_call"})

_LOWEST_TEMPERATURE = 0.01


def why_untrainable(call: Call) -> str | None:
    """Return why a call cannot be trained on: the first of `REASONS` that applies; `None` if the call is trainable."""
    return next((reason for reason, holds in REASONS if holds(call)), None)


def _counts_differ(call: Call) -> bool:
    return any(len(choice.token_ids or ()) != len(choice.logprobs or ()) for choice in call.choices)


def _usage_differs(call: Call) -> bool:
    sampled = sum(len(choice.token_ids or ()) for choice in call.choices)
    # 0 is recorded where the server reported no usage.
    return call.completion_tokens not in (0, sampled)


def _is_greedy(call: Call) -> bool:
    """Return whether the temperature is below 0.01. 0 is greedy, and vLLM raises any other such value to 0.01."""
    temperature = call.params.get("temperature")
    return isinstance(temperature, int | float) and temperature < _LOWEST_TEMPERATURE


def _any_param(name: str, neutral: tuple[Any, ...]) -> Callable[[Call], bool]:
    return lambda call: call.params.get(name) not in neutral


# Every reason, in the order in which they are checked.
REASONS: tuple[tuple[str, Callable[[Call], bool]], ...] = (
    # First, because these hold for every policy and provider: without the whole prompt, not even the answer is worth
    # imitating.
    ("a completion is not a chat", lambda call: call.api == "completions"),
    ("the provider holds a part of the prompt", lambda call: any(name in call.params for name in KEPT_BY_PROVIDER)),
    ("answered by upstream", lambda call: call.policy is UPSTREAM),
    ("the call failed", lambda call: call.status == "error"),
    ("the call was cancelled", lambda call: call.status == "cancelled"),
    ("the stream was not read to its end", lambda call: call.status == "abandoned"),
    ("no answer", lambda call: not call.choices),
    ("prompt token ids are missing", lambda call: not call.prompt_token_ids),
    ("token ids are missing", lambda call: any(not choice.token_ids for choice in call.choices)),
    ("log-probabilities are missing", lambda call: any(choice.logprobs is None for choice in call.choices)),
    ("token ids and log-probabilities differ in number", _counts_differ),
    ("token ids and usage differ in number", _usage_differs),
    (
        "a log-probability is not finite",
        lambda call: not all(math.isfinite(value) for choice in call.choices for value in choice.logprobs or ()),
    ),
    ("how the answer ended is not known", lambda call: any(c.finish_reason not in KNOWN_ENDS for c in call.choices)),
    ("greedy sampling has no exploration", _is_greedy),
    ("top_p cuts the distribution", _any_param("top_p", (None, 1))),
    ("top_k cuts the distribution", _any_param("top_k", (None, 0, -1))),
    ("min_p cuts the distribution", _any_param("min_p", (None, 0))),
    ("logit_bias shifts the distribution", _any_param("logit_bias", (None, {}))),
    ("presence_penalty shifts the distribution", _any_param("presence_penalty", (None, 0))),
    ("frequency_penalty shifts the distribution", _any_param("frequency_penalty", (None, 0))),
    ("repetition_penalty shifts the distribution", _any_param("repetition_penalty", (None, 1))),
    # These mask tokens, and an engine reports log-probabilities over the tokens that are left.
    ("response_format constrains the answer", _any_param("response_format", (None, {"type": "text"}))),
    ("structured_outputs constrains the answer", _any_param("structured_outputs", (None, {}))),
    ("tool_choice constrains the answer", _any_param("tool_choice", (None, "auto", "none"))),
    ("min_tokens constrains the answer", _any_param("min_tokens", (None, 0))),
    ("bad_words constrains the answer", _any_param("bad_words", (None, []))),
    ("allowed_token_ids constrains the answer", _any_param("allowed_token_ids", (None, []))),
)


# Request fields that only engines such as vLLM know. The SDK sends them through `extra_body`.
ENGINE_PARAMS = frozenset(
    {
        "allowed_token_ids", "bad_words", "chat_template_kwargs", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "min_p", "min_tokens",
        "repetition_penalty", "skip_special_tokens", "stop_token_ids", "structured_outputs", "top_k",
        "truncate_prompt_tokens",
    }
)  # fmt: skip

# Request fields that are recorded, and that the engine may be sent. No other field reaches the store.
PARAMS = ENGINE_PARAMS | frozenset(
    {
        "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "modalities", "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort",
        "response_format", "seed", "stop", "temperature", "tool_choice", "top_logprobs", "top_p", "verbosity",
    }
)  # fmt: skip
