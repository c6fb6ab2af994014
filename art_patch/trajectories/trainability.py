"""Tells which fields of a request are stored, and whether a call can be trained on; if it cannot, for which reason.

A call is trainable only if it is token-exact: its token ids and log-probabilities come from the server that sampled
them, are complete, and were sampled from the policy's own distribution. Texts are never tokenised again to replace
missing ids, and missing log-probabilities are never estimated.

In a rollout, the user's code keeps only the SDK's `Choice` object of each call. So the server packs the exact tokens of
the call into an extra field of its choices (`hang`). The SDK keeps fields that it does not know, and the data is plain
JSON, so it is still there after a copy or a dump. If the server did not report token ids or log-probabilities, the call
is not trainable.
"""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from art_patch._lib.loose_json import as_count, as_ids, as_object, as_text
from art_patch.types import JSON, UPSTREAM

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

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


# Kinds of parts that a trainer of text does not see: their tokens stand for what only the engine had.
_MEDIA = frozenset({
    "image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video_url", "video", "file",
    "input_file",
})  # fmt: skip


def _holds_media(call: Call) -> bool:
    contents = (message.get("content") for message in call.messages)
    return any(as_object(part).get("type") in _MEDIA for each in contents if isinstance(each, list) for part in each)


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
    ("the prompt holds an image, audio or file", _holds_media),
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

# --- the extra field of a rollout's choices ---

FIELD = "art_patch"

# Packed, because a Python object for each token of a thousand rollouts would take gigabytes.
_IDS, _NUMBERS = "I", "d"


@dataclass(frozen=True, slots=True)
class Exact:
    """The data about a call that the extra field of one of its choices holds."""

    policy: str  # name of the policy that answered, `NAME@STEP`
    started_at: float  # when the request reached the server, in seconds since the epoch
    duration_ms: float
    params: JSON  # the sampling parameters of the request, as far as they are recorded
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None  # the sampled ids, including the stop token
    logprobs: tuple[float, ...] | None  # of each sampled id, in nats
    prompt_tokens: int  # as the server reported them in `usage`


def hang(answer: dict[str, Any], request: JSON, *, started_at: float, duration_ms: float) -> None:
    """Add the extra field to each choice of an answer, and remove token ids and log-probabilities not requested.

    Args:
        answer: JSON of the answer, with `prompt_token_ids`, and with `token_ids` and log-probabilities in each choice.
            It is changed in place.
        started_at: when the request reached the server, in seconds since the epoch.
        duration_ms: time until the answer was complete.
    """
    prompt = _packed(_IDS, as_ids(answer.get("prompt_token_ids")))
    params = {
        name: value
        for name, value in request.items()
        if name in PARAMS and isinstance(value, str | int | float | bool | list | dict | None)
    }
    asked_ids, asked_logprobs = bool(request.get("return_token_ids")), bool(request.get("logprobs"))
    for choice in answer.get("choices") or ():
        logprobs = (choice.get("logprobs") or {}).get("content")
        choice[FIELD] = {
            "policy": as_text(answer.get("model")),
            "started_at": started_at,
            "duration_ms": duration_ms,
            "params": params,
            "prompt_ids": prompt,
            "ids": _packed(_IDS, as_ids(choice.get("token_ids"))),
            # As doubles, which hold the numbers of the JSON without rounding.
            "logprobs": _packed(_NUMBERS, None if logprobs is None else [token["logprob"] for token in logprobs]),
            "prompt_tokens": as_count((answer.get("usage") or {}).get("prompt_tokens")) or 0,
        }
        if not asked_ids:
            choice.pop("token_ids", None)
        if not asked_logprobs:
            choice["logprobs"] = None
    if not asked_ids:
        answer.pop("prompt_token_ids", None)


def exact_of(choice: Choice) -> Exact | None:
    """Return the data in the extra field of a choice; `None` if it has none, as in answers of other servers."""
    found = (choice.model_extra or {}).get(FIELD)
    if not isinstance(found, dict):
        return None
    fact = cast("dict[str, Any]", found)
    return Exact(
        policy=as_text(fact.get("policy")),
        started_at=float(fact.get("started_at") or 0.0),
        duration_ms=float(fact.get("duration_ms") or 0.0),
        params=as_object(fact.get("params")),
        prompt_token_ids=_unpacked(_IDS, fact.get("prompt_ids")),
        token_ids=_unpacked(_IDS, fact.get("ids")),
        logprobs=_unpacked(_NUMBERS, fact.get("logprobs")),
        prompt_tokens=as_count(fact.get("prompt_tokens")) or 0,
    )


def sampled_tokens(choice: Choice) -> int | None:
    """Return how many tokens were sampled for this answer; `None` if the server did not report their ids."""
    exact = exact_of(choice)
    return None if exact is None or exact.token_ids is None else len(exact.token_ids)


def _packed(kind: str, values: Iterable[float] | None) -> str | None:
    if values is None:
        return None
    return base64.b64encode(zlib.compress(array(kind, values).tobytes(), 1)).decode()  # type: ignore[arg-type]


def _unpacked(kind: str, text: Any) -> Any:
    return tuple(array(kind, zlib.decompress(base64.b64decode(text)))) if isinstance(text, str) else None
