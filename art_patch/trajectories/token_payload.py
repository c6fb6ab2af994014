"""Packs the exact tokens of a call into an extra field of its choices, so that a rollout can be trained on.

In a rollout, the user's code keeps only the SDK's `Choice` object of each call. So the server adds to it the data that
training needs: the policy, the ids of the prompt, the sampled ids with their log-probabilities, and the sampling
parameters. The SDK keeps fields that it does not know, and the data is plain JSON, so it is still there after a copy or
a dump. If the server did not report token ids or log-probabilities, the call is not trainable.
"""

import base64
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from art_patch._lib.loose_json import as_count, as_ids, as_object, as_text
from art_patch.trajectories.trainability import PARAMS
from art_patch.types import JSON

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice

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


def exact_of(choice: "Choice") -> Exact | None:
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


def sampled_tokens(choice: "Choice") -> int | None:
    """Return how many tokens were sampled for this answer; `None` if the server did not report their ids."""
    exact = exact_of(choice)
    return None if exact is None or exact.token_ids is None else len(exact.token_ids)


def _packed(kind: str, values: Iterable[float] | None) -> str | None:
    if values is None:
        return None
    return base64.b64encode(zlib.compress(array(kind, values).tobytes(), 1)).decode()  # type: ignore[arg-type]


def _unpacked(kind: str, text: Any) -> Any:
    return tuple(array(kind, zlib.decompress(base64.b64decode(text)))) if isinstance(text, str) else None
