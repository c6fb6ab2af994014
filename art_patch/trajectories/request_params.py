"""The request fields that are kept: an allow-list, the same for what is recorded and what the engine may be sent."""

from __future__ import annotations

ENGINE_PARAMS = frozenset(
    {
        "allowed_token_ids", "bad_words", "chat_template_kwargs", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "min_p", "min_tokens",
        "repetition_penalty", "skip_special_tokens", "stop_token_ids", "structured_outputs", "top_k",
        "truncate_prompt_tokens",
    }
)  # fmt: skip
"""Request fields that only engines such as vLLM know; the SDK sends them through `extra_body`."""

PARAMS = ENGINE_PARAMS | frozenset(
    {
        "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
        "max_tokens", "modalities", "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort",
        "response_format", "seed", "stop", "temperature", "tool_choice", "top_logprobs", "top_p", "verbosity",
    }
)  # fmt: skip
"""Request fields that are recorded. What is not named here never reaches the store."""
